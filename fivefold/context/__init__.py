"""Context parallelism: every sequence is split over ranks, which attend to each other's tokens."""
