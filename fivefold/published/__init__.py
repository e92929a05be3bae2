"""Runs that others published, and the errors of predictions for them."""
