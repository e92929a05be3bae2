"""Our Triton kernels; each has a plain equivalent in the module that calls it."""
