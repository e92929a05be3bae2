"""Expert parallelism: all-to-all dispatch of tokens to experts on other ranks, and combine."""
