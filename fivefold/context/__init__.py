"""Context parallelism: ranks split every sequence and attend to each other's tokens."""
