"""Mixtures of experts on one device: router, capacity, grouped products."""
