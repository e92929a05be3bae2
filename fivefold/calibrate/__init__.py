"""Measures a machine, so that plans can use its rates instead of data-sheet rates."""
