"""What FSDP2 keeps of one backward, or of one step, for whoever computes next."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fivefold.tensor.deferred_weight import Work


def put_aside(group: Any, narrow: torch.dtype) -> Iterator[Work]:
    """Take gradients of norms and biases, which a backward of dX alone has made; what gives them
    back.

    If several such backwards run before the first weight gradients, they would be sums by then, in
    FSDP2's accumulation dtype. A block is reduced in one dtype: all of its gradients would be
    widened before they are copied into the message.

    Args:
        group: FSDP2's own.
        narrow: dtype in which the gradients of a single microbatch were computed.
    """
    dims = max((held.sharded_param.ndim for held in group.fsdp_params), default=0)
    for held in group.fsdp_params:
        if held.sharded_param.ndim == dims:  # a matrix, of which a sum takes less than each
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


def free_message(state: Any) -> None:
    """Free the last message of a backward when it was reduced, not only when the next one comes.

    FSDP2 keeps the gradients of the block that it reduced last, a stage's ends or its first layer,
    until another backward waits for their reduction. The allocator can wait in its place.
    """
    context = state._comm_ctx
    several = hasattr(context, "reduce_scatter_states")
    kept = context.reduce_scatter_states if several else [context.reduce_scatter_state]
    for message in kept:
        if message is not None and message.event is not None:  # on CPUs it is reduced by now
            message.reduce_scatter_input.record_stream(context.reduce_scatter_stream)
    _forget_messages(context)


def free_gathered(state: Any) -> None:
    """Free the message of a forward's last gather, whose parameters have been copied out of it.

    FSDP2 keeps it for the next forward, through all of a backward.

    Args:
        state: FSDP2's own of a root module.
    """
    context = state._comm_ctx
    if context.all_gather_state is None:
        return
    event = context.all_gather_state.event
    if event is not None:  # nor are there streams on CPUs
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            stream.wait_event(event)  # on which the next message is allocated
    context.all_gather_state = None


def let_go(state: Any, groups: Iterable[Any]) -> list[Any]:
    """Forget what waits, and hand over the streams on which it waited.

    Names are those of torch 2.11 to 2.13.

    Args:
        state: FSDP2's own of a root module.
        groups: the parameter groups below it; their parameters are sharded.

    Returns:
        The streams on which FSDP2 gathers and reduces; none before its first use.
    """
    context = state._comm_ctx
    context.all_gather_state = None
    _forget_messages(context)
    if hasattr(context, "_last_post_reduce_events"):
        context._last_post_reduce_events.clear()
    for group in groups:
        group._all_gather_result = group._post_reduce_event = None
        group._all_reduce_state = group._reshard_after_forward_event = None
    state._state_ctx.post_optim_event = None
    names = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")
    streams = (getattr(context, f"{name}_stream", None) for name in names)
    return [stream for stream in streams if stream is not None]


def _forget_messages(context: Any) -> None:
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None
