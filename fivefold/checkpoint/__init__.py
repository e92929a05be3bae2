"""Checkpoints of any layout that load into any other."""
