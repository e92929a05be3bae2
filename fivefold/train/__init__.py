"""Training: launch, the loop, run folder, console, signals, failures."""
