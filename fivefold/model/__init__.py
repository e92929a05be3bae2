"""The model as plain single-device code, with seams where parallelism is installed."""
