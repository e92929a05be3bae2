"""The proof that a layout computes what one device computes."""
