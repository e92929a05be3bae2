"""What other frameworks reserve: their steps, tensor by tensor, through PyTorch's allocator."""
