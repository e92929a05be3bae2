"""Runs programs, with torch: actions, messages between stages, recorded times."""
