"""Activation memory techniques: recomputation, offloading, and losses that keep no logits."""
