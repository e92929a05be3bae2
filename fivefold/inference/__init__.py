"""Uses a trained model: losses, tasks, and continuations of texts."""
