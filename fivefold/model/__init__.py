"""The transformer as plain single-device code, with replaceable callables ("seams") where
parallelism is installed."""
