"""Reads and expands bash scripts to see what they would run, without executing anything."""
