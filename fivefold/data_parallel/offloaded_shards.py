"""Shards of parameters that are on the device only while FSDP2 gathers them.

FSDP2 can keep shards in host memory by itself (`CPUOffloadPolicy`), and then copies gradients there
as well, and adds them up on the host. Here gradients go as they always do.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.data_parallel import fsdp_internals as internals
from fivefold.mesh import slices

Mark = Any
"""The end of a copy, in the form that the copying side provides."""


class OffloadedShards:
    """The shards of a block (one parameter group of FSDP2) that are off the device between gathers.

    FSDP2 reads each shard from one tensor per parameter. The memory of these is freed; from the
    start of a gather until they are read, parts of another tensor take their place.

    Args:
        group: parameter group with memory that has not been written yet.
        names: names of its parameters, in order.

    Attributes:
        names: names of its parameters, in order.
        sizes: elements of each shard, padded to those of the first rank.
        dtype: dtype of all of them.
    """

    def __init__(self, group: Any, names: Sequence[str]) -> None:
        self._group, self.names = group, tuple(names)
        self._empty = [internals.sent(held) for held in group.fsdp_params]
        self.sizes = [data.numel() for data in self._empty]
        self.dtype: torch.dtype = self._empty[0].dtype
        for data in self._empty:
            data.untyped_storage().resize_(0)
        internals.keep_shards(group)
        self._gather, self._finish = group.unshard, group.wait_for_unshard
        group.unshard, group.wait_for_unshard = self._unshard, self._wait_for_unshard
        self._arrived: Mark = None

    def keep_at(self, fetch: Callable[[Tensor], Mark], wait: Callable[[Mark], None]) -> None:
        """Set where the shards are kept.

        Args:
            fetch: starts copying all of them, one after the other, onto a tensor of the device.
            wait: makes later work on the current stream wait for such a copy.
        """
        self._fetch, self._wait = fetch, wait

    def _unshard(self, async_op: bool = False) -> None:
        group = self._group
        if internals.is_gathering(group) or group.is_unsharded:
            return
        here = torch.empty(sum(self.sizes), dtype=self.dtype, device=group.device)
        self._arrived = self._fetch(here)
        self._put(here.split(self.sizes))
        if group.mesh_info.mesh.size(-1) == 1:  # otherwise read when the gather ends
            self._gather(async_op)
            return
        stream = internals.gather_stream(group, async_op=async_op)
        with group.comm_ctx.device_handle.stream(stream):
            self._wait(self._arrived)
        self._gather(async_op)
        if here.is_cuda:
            here.record_stream(stream)
        self._put(self._empty)

    def _wait_for_unshard(self) -> None:
        if internals.is_gathering(self._group):
            self._wait(self._arrived)
        self._finish()
        self._put(self._empty)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for held, tensor in zip(self._group.fsdp_params, tensors, strict=True):
            internals.send(held, tensor)


def give_memory(
    stage: nn.Module,
    device: torch.device,
    groups: Mapping[nn.Module, Sequence[Any]],
    offloaded: Collection[str],
) -> dict[nn.Module, OffloadedShards]:
    """Allocate the parameters of a stage, with any values, block by block.

    Args:
        stage: stage on the meta device.
        device: device of its parameters.
        groups: FSDP2's parameter groups of each of its blocks: one, or none.
        offloaded: names of the parameters whose shards are not on the device: all of a block,
            or none.

    Returns:
        The blocks whose shards are not on the device.
    """
    names = {parameter: name for name, parameter in stage.named_parameters()}
    named = {
        m: [names[p.sharded_param] for g in of for p in g.fsdp_params] for m, of in groups.items()
    }
    found = {}
    for module in reversed([*stage.modules()]):  # inner modules before their block
        slices.give_memory(module, device)
        internals.use_memory(groups.get(module, ()))
        if not {*offloaded}.isdisjoint(named.get(module, ())):
            found[module] = OffloadedShards(groups[module][0], named[module])
    return found
