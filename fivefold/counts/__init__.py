"""Closed-form counts of a layout: model state, parameters, bytes sent, activations and FLOPs."""
