"""Runs ranks of any layout on one machine, on tensors that have shapes but no values."""
