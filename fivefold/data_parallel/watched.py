"""Shows the gradients of this rank alone, before they are summed with those of its replicas."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fivefold.data_parallel.fsdp import ShardedStage
from fivefold.data_parallel.replicated import ReplicatedStage
from fivefold.mesh.slices import local_tensor

Look = Callable[[Tensor, Tensor], None]


@contextmanager
def watching_gradients(
    stages: Iterable[ShardedStage | ReplicatedStage], look: Look
) -> Iterator[None]:
    """Call `look(parameter, gradient)` in the block for what is about to be summed over replicas.

    Where gradients are summed after each microbatch, it is called as often. The gradient is this
    rank's tensor-parallel part, whole on the data-parallel axes, and must not be changed.
    Parameters that no other rank holds are left out.
    """
    watched: list[tuple[Any, str]] = []
    for stage in stages:
        if isinstance(stage, ReplicatedStage):
            watched += [(bucket, "start") for bucket in stage.buckets]
        else:
            watched += [(group, "post_backward") for group in stage.parameter_groups()]
    for owner, name in watched:
        setattr(owner, name, _after_a_look(owner, getattr(owner, name), look))
    try:
        yield
    finally:
        for owner, name in watched:
            delattr(owner, name)  # what its class has is there again


def _after_a_look(owner: Any, original: Callable[..., Any], look: Look) -> Callable[..., Any]:
    def looked(*arguments: Any) -> Any:
        for parameter, grad in _about_to_be_summed(owner):
            look(parameter, local_tensor(grad))
        return original(*arguments)

    return looked


def _about_to_be_summed(owner: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters and gradients of a bucket, or of a parameter group of FSDP2 that is to reduce."""
    if hasattr(owner, "parameters"):
        for parameter in owner.parameters:
            owner.take(parameter)
            yield parameter, parameter.grad
    elif owner.reduce_grads:
        for held in owner.fsdp_params:
            if hasattr(held, "_unsharded_param"):
                for grad in (held.unsharded_accumulated_grad, held.unsharded_param.grad):
                    if grad is not None:
                        yield held.sharded_param, grad
