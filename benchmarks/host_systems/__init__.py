"""Layers of Fivefold and of its peers, one module each, for benchmarks/host.py."""
