"""Compares what a run sent, held and computed with theory."""
