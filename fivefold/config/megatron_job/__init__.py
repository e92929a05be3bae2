"""Reads Megatron-LM's arguments and translates them into settings."""
