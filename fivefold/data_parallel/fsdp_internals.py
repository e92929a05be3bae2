"""All uses of private parts of PyTorch's FSDP2 (torch 2.11 to 2.13).

A unit (a module that was given to `fully_shard`) has a state; all units of a stage share a context
of streams and messages. A unit's parameter groups each gather and reduce their parameters together,
and have a record of every parameter. Of groups and records, other modules use what FSDP2 names
without an underscore.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def state_of(unit: FSDPModule) -> Any:
    """The state of a unit."""
    return unit._get_fsdp_state()


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """The parameter groups of a unit: a list since torch 2.12, before that one or none."""
    state = state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def begin(root: FSDPModule) -> None:
    """Runs FSDP2's preparation before the first forward of a root unit; later calls do nothing."""
    state_of(root)._lazy_init()


def end_backward(root: FSDPModule) -> None:
    """Runs FSDP2's end of a backward.

    There is no public call for this, nor for "reduce now", a group's `post_backward`; PyTorch's own
    pipelining uses the same ones.
    """
    state_of(root)._root_post_backward_final_callback()


def without_hooks(unit: FSDPModule) -> None:
    """Stop FSDP2 from gathering before a unit's forward and reducing after its backward."""
    state = state_of(unit)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def before_forward(state: Any, unit: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Runs the first of these hooks; returns the unit's positional and keyword arguments."""
    return state._pre_forward(unit, given, named)


def after_forward(state: Any, unit: Any, given: tuple[Any, ...], out: Any) -> Any:
    """Runs the second hook; returns the unit's result."""
    return state._post_forward(unit, given, out)


def reduce_into(group: Any, dtype: torch.dtype) -> None:
    """Make a group reduce gradients into this type instead of its parameters'."""
    group._orig_dtype = dtype
    # FSDP2 would look the types up again in each gather that is asked for by name.
    group._init_mp_dtypes = lambda: None


def is_gathering(group: Any) -> bool:
    """Whether a gather has started and has not been waited for."""
    return group._all_gather_result is not None


def gather_stream(group: Any, *, async_op: bool) -> Any:
    """The stream on which the next gather of a group reads its shards."""
    stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    return stream


def use_memory(groups: Iterable[Any]) -> None:
    """Let groups gather from memory that their shards have been given."""
    with torch.no_grad():
        for held in (held for group in groups for held in group.fsdp_params):
            held.reset_sharded_param()


def keep_shards(group: Any) -> None:
    """Skip the group's check of its shards' memory before its first use."""
    group._reset_sharded_params = True


def was_gathered(held: Any) -> bool:
    """Whether a gathered parameter (`held.unsharded_param`) exists, which stays."""
    return hasattr(held, "_unsharded_param")


def sent(held: Any) -> Tensor:
    """The part of a shard that a gather reads: flat, and padded to the longest rank's."""
    data: Tensor = held._sharded_param_data
    return data


def send(held: Any, data: Tensor) -> None:
    """Make the next gather read another tensor instead."""
    held._sharded_param_data = data


def place_of(held: Any) -> tuple[nn.Module, str]:
    """The module that a parameter is of, and its name there."""
    return held._module_info.module, held._module_info.param_name


class OwnRecord(FSDPParam):
    """FSDP2's record of a parameter; a subclass says what is gathered and made of it."""

    def make_whole(self) -> nn.Parameter:
        """The whole parameter, in the memory of what is gathered, or a DTensor of it."""
        raise NotImplementedError

    def init_unsharded_param(self) -> None:
        """Make the whole parameter once."""
        if not was_gathered(self):
            self._unsharded_param = self.make_whole()

    @property
    def whole_size(self) -> torch.Size:
        """Size of the whole parameter, of which other axes may have parts."""
        return self._orig_size

    @property
    def whole_stride(self) -> tuple[int, ...]:
        """Its stride."""
        return self._contiguous_orig_stride

    @property
    def whole_spec(self) -> Any:
        """Its layout on other axes; None if it has none. Torch 2.11 has another name for it."""
        known: Any = self
        if hasattr(self, "_unsharded_dtensor_spec"):
            return known._unsharded_dtensor_spec
        return known._tp_spec if self.is_dtensor else None


def free_message(root: FSDPModule) -> None:
    """Free the last message of a backward when it was reduced, not only when the next one comes.

    FSDP2 keeps the gradients of the block that it reduced last, a stage's ends or its first layer,
    until another backward waits for their reduction. The allocator can wait in its place.
    """
    context = state_of(root)._comm_ctx
    several = hasattr(context, "reduce_scatter_states")
    kept = context.reduce_scatter_states if several else [context.reduce_scatter_state]
    for message in kept:
        if message is not None and message.event is not None:  # on CPUs it is reduced already
            message.reduce_scatter_input.record_stream(context.reduce_scatter_stream)
    _forget_messages(context)


def free_gathered(root: FSDPModule) -> None:
    """Free the message of a forward's last gather, whose parameters have been copied out of it.

    FSDP2 keeps it for the next forward, through all of a backward.
    """
    context = state_of(root)._comm_ctx
    if context.all_gather_state is None:
        return
    event = context.all_gather_state.event
    if event is not None:  # CPUs have no streams
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            stream.wait_event(event)  # they allocate the next message
    context.all_gather_state = None


def release_gathers(root: FSDPModule, groups: Iterable[Any]) -> list[Any]:
    """Drop pending waits, and return the streams on which FSDP2 waited.

    Args:
        root: root unit.
        groups: the parameter groups below it; their parameters are sharded.

    Returns:
        The streams on which FSDP2 gathers and reduces; none before its first use.
    """
    state = state_of(root)
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
