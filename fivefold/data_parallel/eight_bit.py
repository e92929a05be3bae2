"""Gathers weights of linear layers in the 8 bits in which they are multiplied.

A weight that FSDP2 gathers in bf16 is narrowed by every rank, in every microbatch, forward and
backward. Here each rank narrows its shard before the gather. The bits are the same, because the
scales are: the largest elements of all blocks are compared over the ranks once a step.

Shapes: E experts, 1 without; F, H rows and columns of a weight; M, K rows and columns of a block.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.data_parallel.fsdp_internals import OwnRecord, place_of, sent
from fivefold.mesh.collectives import start_all_reduce
from fivefold.model.eight_bit.delayed import WEIGHT, OperandScales
from fivefold.model.eight_bit.fp8 import E4M3, largest, narrowed, over, scales
from fivefold.model.eight_bit.layers import products_of
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.leaves import local


class EightBitParam(OwnRecord):
    """FSDP2's record of a parameter, for a weight that is gathered and held in 8 bits.

    FSDP2's own way would take a subclass of Tensor for the masters, whose every use by optimizer
    and checkpoints is then dispatched in Python. The whole weight is an E4M3 leaf of autograd with
    gradients of the compute dtype, and an attribute `inverse_scales`.

    Attributes:
        scale: fp32 [E, blocks of F, blocks of H], what elements are multiplied with.
        inverse: 1 / scale.
        compute_dtype: dtype of gradients, and in which masters are read.
    """

    scale: Tensor
    inverse: Tensor
    compute_dtype: torch.dtype

    @property
    def products(self) -> EightBit:
        """The products of the layer that uses the weight."""
        found = products_of(place_of(self)[0])
        assert found is not None, "its layer multiplies in 8 bits"
        return found

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """Let FSDP2 gather this parameter's own 8-bit tensors; by itself it would cast the
        shard."""
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = None

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The bits of this rank's shard, padded to the longest one."""
        shard = self._shard()
        sent = shard.new_zeros(self.padded_sharded_param_size, dtype=torch.uint8)
        if shard.numel():
            experts, rows = self._range()
            m, k = self._block()
            scale = self.scale[experts].repeat_interleave(m, 1)[:, rows]
            blocks = F.pad(shard, (0, -shard.shape[2] % k)).unflatten(2, (-1, k))
            bits = narrowed(blocks, scale[..., None], E4M3).flatten(2)[..., : shard.shape[2]]
            part = sent[tuple(slice(size) for size in self.sharded_size)]
            part.copy_(bits.reshape(self.sharded_size).view(torch.uint8))
        return [sent.view(-1)]

    def init_unsharded_param(self) -> None:
        """Make the leaf once, and give it this step's scales."""
        super().init_unsharded_param()
        leaf = local(self.unsharded_param)
        leaf.inverse_scales = self.inverse  # type: ignore[attr-defined]

    def make_whole(self) -> nn.Parameter:
        """The leaf, in the memory of the gathered weight."""
        bits = self.all_gather_outputs[0].view(E4M3)
        bits = bits.as_strided(self.whole_size, self.whole_stride)
        spec, whole = self.whole_spec, bits
        if spec is not None and spec.tensor_meta is not None:
            meta = spec.tensor_meta._replace(dtype=E4M3)
            whole = DTensor(bits, replace(spec, tensor_meta=meta), requires_grad=False)
        made = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
        for leaf in {made, local(made)}:
            leaf.grad_dtype = self.compute_dtype
        return made

    def largest(self) -> Tensor:
        """[E, blocks of F, blocks of H] largest elements, 0 where this rank holds nothing of a
        block.

        Of elements in the compute dtype: rounding keeps their order.
        """
        shard, (experts, rows), (m, k) = self._shard(), self._range(), self._block()
        whole = self._whole_shape()
        found = shard.new_zeros(whole[0], -(-whole[1] // m), -(-whole[2] // k), dtype=torch.float32)
        if shard.numel():
            before, size = rows.start % m, rows.stop - rows.start
            padding = 0, -whole[2] % k, before, -(before + size) % m
            padded = F.pad(shard, padding) if any(padding) else shard
            blocks = padded.reshape(-1, m, padded.shape[2] // k, k)  # of all experts in turn
            at = slice(rows.start // m, -(-rows.stop // m))
            found[experts, at] = largest(blocks).view(len(shard), -1, found.shape[2])
        return found

    def take(self, largest: Tensor) -> None:
        """Set the scales from the largest elements of all ranks."""
        how = self.products.recipe
        self._set(scales(largest, E4M3, powers_of_two=how.powers_of_two))

    def take_delayed(self, known: OperandScales) -> None:
        """Set the scales known from earlier steps, and record this rank's largest elements."""
        seen = known.seen[WEIGHT]
        torch.maximum(seen, self.largest().view(-1), out=seen)
        self._set(known.scale[WEIGHT].view(-1, 1, 1).clone())

    def _set(self, scale: Tensor) -> None:
        self.scale, self.inverse = scale, over(1.0, scale)

    def _shard(self) -> Tensor:
        """This rank's part of the master, [E, F, H] without padding, in the compute dtype."""
        padded = sent(self).view(self.padded_sharded_param_size)
        part = padded[tuple(slice(size) for size in self.sharded_size)]
        return (part if part.dim() == 3 else part[None]).to(self.compute_dtype)

    def _range(self) -> tuple[slice, slice]:
        """The experts, and the rows of each, in this rank's shard."""
        dim = self.fsdp_placement.dim
        start = self.mesh_info.shard_mesh_rank * self.padded_sharded_param_size[dim]
        part, (experts, rows, _) = slice(start, start + self.sharded_size[dim]), self._whole_shape()
        if dim == len(self.whole_size) - 2:
            return slice(0, experts), part
        return part, slice(0, rows)

    def _whole_shape(self) -> tuple[int, int, int]:
        *experts, rows, columns = self.whole_size
        return prod(experts), rows, columns

    def _block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; at least one."""
        block, (_, *sizes) = self.products.weight_block, self._whole_shape()
        m, k = (each or max(size, 1) for each, size in zip(block, sizes, strict=True))
        return m, k


def gather_in_eight_bits(group: Any, compute_dtype: torch.dtype) -> list[EightBitParam]:
    """Let a parameter group of FSDP2 gather the weights of linear layers in 8 bits.

    Returns:
        The records of those weights.
    """
    found = []
    for held in group.fsdp_params:
        module, name = place_of(held)
        if name == "weight" and products_of(module) is not None:
            held.__class__ = EightBitParam
            held.compute_dtype = compute_dtype
            found.append(held)
    return found


def agree_on_scales(held: Iterable[EightBitParam], group: dist.ProcessGroup | None) -> None:
    """Set the scales of weights that a group shards: by one message, unless they are already
    known."""
    every = []
    for each in held:
        if (delayed := each.products.delayed) is not None:
            each.take_delayed(delayed)
        else:
            every.append(each)
    if not every:
        return
    found = [each.largest() for each in every]
    message = torch.cat([largest.flatten() for largest in found])
    summed = start_all_reduce(message, group, dist.ReduceOp.MAX).wait()
    ends = list(accumulate(largest.numel() for largest in found))
    parts = summed.tensor_split(ends[:-1])
    for each, largest_, part in zip(every, found, parts, strict=True):
        each.take(part.view_as(largest_))
