"""Measures a machine, so that the planner reckons with it rather than with a data sheet."""
