"""Attention: its layers, the kernels they may call, and which keys a query sees."""
