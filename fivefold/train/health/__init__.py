"""Watches a run's health: hangs, stragglers, silent errors, harmful steps."""
