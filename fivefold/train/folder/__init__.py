"""What a run keeps, and what it starts from."""
