"""What the actions of a program cost: modelled, stated or measured."""
