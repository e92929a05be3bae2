"""Times of operations, layers and stages for a microbatch."""
