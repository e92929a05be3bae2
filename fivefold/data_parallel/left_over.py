"""Handles gradients that a backward has left where FSDP2 accumulates them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fivefold.tensor.deferred_weight import Work


def put_aside(group: Any, narrow: torch.dtype) -> Iterator[Work]:
    """Set aside the gradients of norms and biases from a backward of dX alone; returns a function
    that restores them.

    If several such backwards run before the first weight gradients, they would be sums by then, in
    FSDP2's accumulation dtype. A block is reduced in one dtype: all of its gradients would be
    widened before they are copied into the message.

    Args:
        group: FSDP2's own.
        narrow: dtype in which the gradients of a single microbatch were computed.
    """
    dims = max((held.sharded_param.ndim for held in group.fsdp_params), default=0)
    for held in group.fsdp_params:
        if held.sharded_param.ndim == dims:  # a matrix: one sum takes less than two
            continue
        whole, grad = held.unsharded_param, held.unsharded_accumulated_grad
        grad = whole.grad if grad is None else grad
        if grad is not None:
            whole.grad = held.unsharded_accumulated_grad = None
            yield Work((whole,), partial(setattr, whole, "grad", grad.to(narrow)), None)


def complete(group: Any, narrow: torch.dtype | None) -> None:
    """Reduce a group, after giving every parameter a gradient, in the same dtype.

    Gradients that B itself computed (of a fused output layer) may already be accumulated; if
    several B's ran before the first W, that W has already taken them.

    Args:
        group: FSDP2's own.
        narrow: dtype in which the gradients of a single microbatch were computed, in which they
            are copied into the message; None: some are sums, in FSDP2's accumulation dtype.
    """
    sums = any(held.unsharded_accumulated_grad is not None for held in group.fsdp_params)
    for held in group.fsdp_params:
        if not held.sharded_param.requires_grad:
            continue
        if held.unsharded_accumulated_grad is None and held.unsharded_param.grad is None:
            whole = held.unsharded_param
            whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        held.accumulate_unsharded_grad_if_needed()
        if narrow is None and sums:
            held.to_accumulated_grad_if_needed()
        elif narrow is not None and held.unsharded_accumulated_grad is not None:
            held.unsharded_param.grad = held.unsharded_accumulated_grad.to(narrow)
            held.unsharded_accumulated_grad = None
    group.post_backward()
