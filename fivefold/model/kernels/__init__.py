"""Triton kernels of ours; each has a plain twin in the module that calls it."""
