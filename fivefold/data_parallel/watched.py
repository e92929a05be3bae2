"""Observes the gradients of this rank alone, before they are summed over replicas."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fivefold.data_parallel.fsdp import ShardedStage
from fivefold.data_parallel.fsdp_internals import was_gathered
from fivefold.data_parallel.replicated import ReplicatedStage
from fivefold.data_parallel.stage_gradients import StageGradients
from fivefold.mesh.slices import local_tensor

Look = Callable[[Tensor, Tensor], None]
Show = Callable[[Any], Iterator[tuple[Tensor, Tensor]]]


@contextmanager
def watching_gradients(stages: Iterable[StageGradients], look: Look) -> Iterator[None]:
    """In the block, call `look(parameter, gradient)` before a gradient is summed over replicas.

    Where gradients are summed after each microbatch, it is called as often. The gradient is this
    rank's tensor-parallel part, whole on the data-parallel axes, and must not be changed.
    Parameters that no other rank holds are left out.
    """
    watched: list[tuple[Any, str, Show]] = []
    for stage in stages:
        if isinstance(stage, ReplicatedStage):
            watched += [(bucket, "start", _of_bucket) for bucket in stage.buckets]
        elif isinstance(stage, ShardedStage):
            watched += [(group, "post_backward", _of_group) for group in stage.parameter_groups()]
    for owner, name, show in watched:
        setattr(owner, name, _after_a_look(owner, getattr(owner, name), show, look))
    try:
        yield
    finally:
        for owner, name, _ in watched:
            delattr(owner, name)  # uncovers the class's own again


def _after_a_look(
    owner: Any, original: Callable[..., Any], show: Show, look: Look
) -> Callable[..., Any]:
    def looked(*arguments: Any) -> Any:
        for parameter, grad in show(owner):
            look(parameter, local_tensor(grad))
        return original(*arguments)

    return looked


def _of_bucket(bucket: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients that a bucket is about to sum."""
    for parameter in bucket.parameters:
        bucket.take(parameter)
        yield parameter, parameter.grad


def _of_group(group: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients that a parameter group of FSDP2 is about to reduce; nothing if it only
    accumulates."""
    if not group.reduce_grads:
        return
    for held in group.fsdp_params:
        if was_gathered(held):
            for grad in (held.unsharded_accumulated_grad, held.unsharded_param.grad):
                if grad is not None:
                    yield held.sharded_param, grad
