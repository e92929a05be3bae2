"""Runs ranks of any layout on one machine, with shapes in the place of numbers."""
