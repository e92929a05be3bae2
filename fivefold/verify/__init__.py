"""Verification that a layout computes what one device computes."""
