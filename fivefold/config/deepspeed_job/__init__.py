"""Reads DeepSpeed's settings file and translates it into settings."""
