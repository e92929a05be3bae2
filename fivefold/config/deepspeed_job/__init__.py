"""Jobs of DeepSpeed: their file of settings, and what it is here."""
