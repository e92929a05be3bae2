"""Rules of settings: their values, what they depend on, and what goes together."""
