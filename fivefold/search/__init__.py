"""Which layout to use: legal ones, bounds on them, close looks, the best."""
