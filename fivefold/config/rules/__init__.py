"""Rules of settings: allowed values, dependences and combinations."""
