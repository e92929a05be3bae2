"""Weights of other programs, in and out."""
