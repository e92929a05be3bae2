"""Generators of pipeline programs."""
