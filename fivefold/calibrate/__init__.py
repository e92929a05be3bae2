"""Measures a machine, so that plans use its rates instead of those of a data sheet."""
