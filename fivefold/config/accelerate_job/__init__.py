"""Reads the settings of Hugging Face Accelerate's launcher and translates them into settings."""
