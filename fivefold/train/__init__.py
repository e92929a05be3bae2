"""The training loop and its life: launch, run folder, console, signals."""
