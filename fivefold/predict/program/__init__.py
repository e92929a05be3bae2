"""How long a pipeline program takes, for many sets of costs at once."""
