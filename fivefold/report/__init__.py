"""Reads run folders, and shows runs to people."""
