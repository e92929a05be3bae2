"""Runs that others published, and how far predictions are off on them."""
