"""Ranks, groups, and what of a global tensor lies where."""
