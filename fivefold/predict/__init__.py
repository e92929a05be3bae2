"""Time and memory of one layout on one cluster."""
