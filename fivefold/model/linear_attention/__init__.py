"""Linear attention: layers with a state of constant size, however many tokens they have read."""
