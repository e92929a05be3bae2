"""Expert parallelism: tokens on their way to experts on other ranks, and back."""
