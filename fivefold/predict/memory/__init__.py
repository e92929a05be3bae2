"""Predicts the memory of each rank, and when in the step it peaks."""
