"""Replays steps of other frameworks, tensor by tensor, on a model of PyTorch's allocator."""
