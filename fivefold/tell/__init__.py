"""Reports a plan: as text, as a page, as JSON, and as settings for trainers."""
