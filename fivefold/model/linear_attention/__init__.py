"""Linear attention: layers that keep a state of one size, however many tokens they have read."""
