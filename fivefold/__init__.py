"""Fivefold: train transformer language models across five dimensions of parallelism."""

__version__ = "0.1.0"
