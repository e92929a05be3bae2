"""A planned layout as settings that a trainer takes."""
