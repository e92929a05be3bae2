"""What a run keeps on disk, and what it starts from."""
