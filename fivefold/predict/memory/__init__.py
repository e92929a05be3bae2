"""How much memory a rank needs, and when in the step most."""
