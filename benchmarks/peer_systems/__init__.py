"""Training systems measured side by side by benchmarks/peers.py, one worker script each."""
