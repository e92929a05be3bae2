"""Learns a machine's constants from runs on it, and which layouts are worth trying next."""
