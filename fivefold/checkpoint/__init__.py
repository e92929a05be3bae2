"""Saves checkpoints from any layout, and loads them into any other."""
