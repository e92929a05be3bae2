"""What a bash script would run: read and expanded here, with nothing executed."""
