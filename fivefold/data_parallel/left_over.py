"""What FSDP2 keeps of one step for whoever computes next."""

from collections.abc import Iterable
from typing import Any


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
