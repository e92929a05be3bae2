"""Ranks and their coordinates, process groups, collectives, and slices of global tensors."""
