"""Custom all-gather and reduce-scatter for FSDP2."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fivefold.data_parallel import fsdp_internals as internals
from fivefold.data_parallel.blocks import GRADIENT_BITS, WEIGHT_BITS
from fivefold.data_parallel.policy import Policy
from fivefold.data_parallel.quantised import Blocks, Format
from fivefold.mesh.collectives import (
    Pending,
    exchange_rows,
    group_size,
    start_all_gather,
    start_reduce_scatter,
)
from fivefold.mesh.groups import NodeGroups


class _Waitable(dist.Work):
    """The type of work object that FSDP2 waits for."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._pending.wait()
        return True


class _Buffers:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Buffers):
    """Pairwise all-gather for gloo."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> _Waitable | None:
        """[n] -> [P*n] into `output_tensor`, which may contain `input_tensor`."""
        pending = start_all_gather(input_tensor, group, output_tensor)
        return _finish(pending, async_op)


class ReduceScatter(_Buffers):
    """Reduce-scatter with its own dtype on the wire; pairwise, and in rank order, for gloo.

    Args:
        wire_dtype: type in which gradients are sent.
        sum_dtype: type in which they are added. A wider one than the wire's, as in Megatron-LM's
            `reduce_scatter_with_fp32_accumulation`, rounds each gradient once and no sum, and needs
            an all-to-all: a ring sends sums, which its links round.
    """

    def __init__(self, wire_dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
        self._wire_dtype, self._sum_dtype = wire_dtype, sum_dtype

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> _Waitable | None:
        """[P*n] -> [n] into `output_tensor`; `op` is a sum, as set in `fsdp.py`."""
        types = self._wire_dtype, self._sum_dtype
        return _finish(start_reduce_scatter(input_tensor, group, output_tensor, *types), async_op)


class NodeGather(_Buffers):
    """The all-gathers of ZeRO++ (Wang et al., 2023): in few bits, and within a node.

    The first gather of a step is divided once more among the ranks of a node, and later gathers of
    the step read from there (hpZ): the same bytes, so the same weights. DeepSpeed divides it again
    in every forward; the weights are the same until they are updated.

    Args:
        node: ranks of a node; None: every gather is over all ranks.

    Attributes:
        format: form of the messages (qwZ); None: weights as they are.
        kept: this rank's part of the gathered messages; None: the next gather is over all ranks.
    """

    def __init__(self, format: Format | None, node: dist.ProcessGroup | None) -> None:
        self.format, self._node = format, node
        self.kept: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> _Waitable | None:
        """[n] -> [P*n] into `output_tensor`, which may contain `input_tensor`."""
        sent, among = self.kept, self._node
        if sent is None:
            sent, among = input_tensor, group
            if self.format is not None:
                sent = self.format.pack(input_tensor.view(1, 1, -1)).flatten()
        target = output_tensor if self.format is None else None
        gathering = start_all_gather(sent, among, target)

        def finish() -> Tensor:
            gathered = gathering.finish()
            if self._node is not None and self.kept is None:
                self.kept = gathered.view(self._node.size(), -1)[self._node.rank()].clone()
            if self.format is not None:
                size = group.size()
                self.format.unpack(gathered.view(1, size, -1), output_tensor.view(size, -1))
            return output_tensor

        return _finish(Pending(gathering.works, finish), async_op)


class HierarchicalReduceScatter(_Buffers):
    """ZeRO++'s reduction in few bits (qgZ; Wang et al., 2023): all-to-alls instead of a ring.

    A ring would round every sum that it passes on. Here each gradient is rounded once, and the sum
    of a node once more: ranks of a node exchange their gradients, sum them in rank order, and ranks
    with the same place in all nodes exchange these sums.

    Args:
        format: form of the messages.
        inner: ranks of a node; None: all ranks exchange their gradients at once.
        outer: ranks with this rank's place in every node.

    Attributes:
        format: form of the messages.
    """

    def __init__(
        self, format: Format, inner: dist.ProcessGroup | None, outer: dist.ProcessGroup | None
    ) -> None:
        self.format, self._inner, self._outer = format, inner, outer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """[P*n] -> [n] into `output_tensor`; `op` is a sum, as set in `fsdp.py`."""
        assert not async_op, "FSDP2 reduces on a stream of its own"
        shares = input_tensor.view(group.size(), 1, -1)
        if self._inner is not None:
            by_node = shares.view(-1, group_size(self._inner), shares.shape[2])
            shares = self._exchanged(by_node.transpose(0, 1), self._inner)[:, None]
        output_tensor.copy_(self._exchanged(shares, self._outer or group).view(-1))

    def _exchanged(self, x_PRN: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's [R, N] of the sum over a group; the input has R rows for each of P ranks in
        order."""
        ranks, rows, elements = x_PRN.shape
        sent = self.format.pack(x_PRN).view(ranks, -1)
        received = exchange_rows(sent, group)
        total = x_PRN.new_empty(rows, elements)
        return self.format.unpack(received.view(ranks, rows, -1), total)


def set_communication(
    unit: FSDPModule, groups: Iterable[Any], mesh: DeviceMesh, policy: Policy, nodes: NodeGroups
) -> Iterator[NodeGather | HierarchicalReduceScatter]:
    """Replace FSDP2's collectives where its own are slow, or lack a requested format.

    Args:
        unit: a unit of FSDP2.
        groups: FSDP2's own of its parameters.
        mesh: replicas, if there are any, and shards of it.
        policy: FSDP2 settings.
        nodes: groups within nodes and between them.

    Yields:
        ZeRO++'s.
    """
    module: Any = unit  # ours do not derive from FSDP2's abstract classes
    on_cpu = mesh.device_type == "cpu"
    if not policy.shards or mesh.size(-1) == 1:
        return
    held = [each for group in groups for each in group.fsdp_params]
    sizes = [(each.sharded_param.shape, internals.sent(each).numel()) for each in held]
    if policy.quantised_weights or nodes.hpz is not None:
        blocks, dtype = Blocks(WEIGHT_BITS), policy.compute_dtype
        format = Format.of(sizes, blocks, dtype) if policy.quantised_weights else None
        gather = NodeGather(format, nodes.hpz)
        module.set_custom_all_gather(gather)
        yield gather
    elif on_cpu:
        module.set_custom_all_gather(AllGather())
    if policy.quantised_gradients:
        format = Format.of(sizes, Blocks(GRADIENT_BITS), policy.gradient_dtype)
        reduction = HierarchicalReduceScatter(format, nodes.qgz_inner, nodes.qgz_outer)
        module.set_custom_reduce_scatter(reduction)
        yield reduction
    elif on_cpu or {policy.wire_dtype, policy.sum_dtype} != {policy.gradient_dtype}:
        module.set_custom_reduce_scatter(ReduceScatter(policy.wire_dtype, policy.sum_dtype))


def _finish(pending: Pending, async_op: bool) -> _Waitable | None:
    if async_op:
        return _Waitable(pending)
    pending.wait()
    return None
