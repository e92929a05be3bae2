"""Jobs of torchtitan: TOML files, command lines, saved settings, and what they are here."""
