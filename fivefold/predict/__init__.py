"""Predicts the time and the memory of one layout on one cluster."""
