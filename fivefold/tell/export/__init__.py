"""Exports a planned layout as settings for a trainer."""
