"""Linear layers that multiply 8-bit floats: scales, kernels, and their plain equivalents."""
