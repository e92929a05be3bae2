"""A process group of which only this process exists."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fivefold.mesh.device import REHEARSED_GPUS


@contextmanager
def pretended_world(rank: int, size: int, *, gpus: bool) -> Iterator[None]:
    """Act as one of `size` ranks, in groups that transfer nothing.

    Args:
        rank: number of this process among them.
        size: number of ranks.
        gpus: whether groups take the paths of GPUs' collectives, or those of gloo.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if gpus and not hasattr(dist.Backend, REHEARSED_GPUS.upper()):
        dist.Backend.register_backend(
            REHEARSED_GPUS, _group, extended_api=True, devices=["cpu", "cuda"]
        )
    options = _fake_group().Options()
    backend = REHEARSED_GPUS if gpus else "fake"
    shown = sys.excepthook
    dist.init_process_group(
        backend, rank=rank, world_size=size, store=FakeStore(), pg_options=options
    )
    sys.excepthook = shown  # torch names the rank before each line, once more for each group made
    try:
        yield
    finally:
        dist.destroy_process_group()
        # What operations on DTensors give is kept by mesh, and meshes are equal whatever rank looks
        # at them: the tensors of another rank, or of one forked from here, would have this one's
        # place.
        _clear_sharding_prop_cache()


def _group(common: Any, options: Any) -> Any:
    return _fake_group()._create_internal(common.group_rank, common.group_size, options)


def _fake_group() -> Any:
    """torch's private class of groups that transfer nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup
