"""Whether a run sent, held and computed what theory says."""
