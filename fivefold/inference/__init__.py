"""What a trained model is asked: losses, tasks, and texts that it continues."""
