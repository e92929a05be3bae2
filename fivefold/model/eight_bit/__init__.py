"""Linear layers that multiply 8-bit floats, with their scales and kernels' twins."""
