"""Training: the loop and its engine, with console and metrics."""
