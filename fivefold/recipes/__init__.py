"""Runs that ship with Fivefold, one TOML file each."""
