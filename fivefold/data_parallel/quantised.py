"""Messages of ZeRO++ (Wang et al., 2023): blocks of integers, each with a scale.

On a GPU, Triton kernels read and write each number once; elsewhere, and for fp64, PyTorch's
operations do the same, bit by bit.

Shapes: R messages, N elements of one, M bytes of one, B blocks of K elements; P messages that are
added up. Runs are numbers of a message that lie side by side in it: [R, N] each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.data_parallel.blocks import BLOCK, SCALE_BYTES, in_few_bits
from fivefold.mesh.collectives import sum_in_order
from fivefold.mesh.device import runs_triton

TINY = 1e-30  # least largest element that a scale is made for: zeros get a finite one, too
SIGN = 8  # added to 4-bit integers of -7 to 7, two of which share a byte
_NIBBLE = 16
_EXPONENT = 0x7F800000  # bits of an fp32


@dataclass(frozen=True)
class Blocks:
    """Rounds numbers to blocks of integers, to nearest, ties to even.

    Attributes:
        bits: 8 or 4 bits of an integer.
        size: elements of a block.
        powers_of_two: whether scales are rounded up to powers of two.
    """

    bits: int
    size: int = BLOCK
    powers_of_two: bool = False

    def pack(self, x_RN: Tensor) -> Tensor:
        """[R, N] -> [R, M] bytes: the scales, then the integers.

        A block with an element that is not finite becomes NaN.
        """
        x_RBK = F.pad(x_RN, (0, -x_RN.shape[1] % self.size)).unflatten(1, (-1, self.size))
        x_RBK = x_RBK.to(torch.promote_types(x_RN.dtype, torch.float32))
        most = 2 ** (self.bits - 1) - 1
        step_RB = self._step(x_RBK.abs().amax(2).float() / most)
        integers = (x_RBK / step_RB[..., None]).round_().clamp_(-most, most).to(torch.int8)
        integers = integers.flatten(1)
        if self.bits == 4:
            low, high = (integers + SIGN).view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
            integers = low + high * _NIBBLE
        return torch.cat((step_RB.view(torch.uint8), integers.view(torch.uint8)), 1)

    def unpack(self, sent_RM: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """[R, M] -> [R, `elements`] in `dtype`, multiplied in at least fp32."""
        blocks = -(-elements // self.size)
        steps, integers = sent_RM.split((SCALE_BYTES * blocks, self._bytes(blocks)), 1)
        if self.bits == 4:
            pairs = torch.stack((integers % _NIBBLE, integers // _NIBBLE), 2).flatten(1)
            integers = pairs.view(torch.int8) - SIGN
        wide = torch.promote_types(dtype, torch.float32)
        values = integers.view(torch.int8).to(wide).unflatten(1, (blocks, self.size))
        step_RB = steps.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return values.mul_(step_RB[..., None]).flatten(1)[:, :elements].to(dtype)

    def pack_runs(self, runs: Sequence[Tensor], sent_RM: Tensor) -> None:
        """Runs [A, B, N], R = A x B, as one message each."""
        if not _by_kernels(runs[0]):
            sent_RM.copy_(self.pack(_joined(runs)))
            return
        from fivefold.data_parallel import quantised_kernels

        if any(run.shape[-1] % self.size for run in runs[:-1]):
            runs = [torch.cat(tuple(runs), -1)]
        quantised_kernels.pack(self, runs, sent_RM)

    def unpack_runs(self, sent_PRM: Tensor, runs: Sequence[Tensor]) -> None:
        """Unpack P ranks' messages into runs [A, B, N], R = A x B; sums over P in order."""
        if _by_kernels(runs[0]):
            from fivefold.data_parallel import quantised_kernels

            quantised_kernels.unpack(self, sent_PRM, runs)
        else:
            _unpack_each(self, sent_PRM, runs)

    def length(self, elements: int) -> int:
        """Bytes of this many elements."""
        blocks = -(-elements // self.size)
        return SCALE_BYTES * blocks + self._bytes(blocks)

    def rounded(self, x: Tensor) -> Tensor:
        """A tensor of any shape as it arrives if sent as one message: quantised and unpacked."""
        flat = x.reshape(1, -1)
        return self.unpack(self.pack(flat), flat.shape[1], x.dtype).view_as(x)

    def _bytes(self, blocks: int) -> int:
        return blocks * self.size * self.bits // 8

    def _step(self, step: Tensor) -> Tensor:
        """The value of one step of the integers of each block."""
        step = step.clamp(min=TINY)
        if not self.powers_of_two:
            return step
        power = (step.view(torch.int32) & _EXPONENT).view(torch.float32)
        return torch.where(step > power, power * 2, step)


@dataclass(frozen=True)
class Whole:
    """Elements of `dtype` unchanged, instead of blocks."""

    dtype: torch.dtype

    def pack_runs(self, runs: Sequence[Tensor], sent_RM: Tensor) -> None:
        """As `Blocks.pack_runs`."""
        sent_RM.copy_(_joined(runs).to(self.dtype).contiguous().view(torch.uint8))

    def unpack_runs(self, sent_PRM: Tensor, runs: Sequence[Tensor]) -> None:
        """As `Blocks.unpack_runs`."""
        _unpack_each(self, sent_PRM, runs)

    def unpack(self, sent_RM: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """[R, M] -> [R, `elements`] in `dtype`."""
        whole = sent_RM.clone(memory_format=torch.contiguous_format).view(self.dtype)
        assert whole.shape[1] == elements, "the message holds these elements"
        return whole.to(dtype)

    def length(self, elements: int) -> int:
        """Bytes of this many elements."""
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class Format:
    """The messages of a unit of parameters: its matrices in blocks, then its vectors as they are.

    Attributes:
        sizes: elements of each parameter in a message.
        few: whether each is sent in blocks.
        blocks: how; `Whole` if nothing is rounded.
        dtype: type of the rest.
    """

    sizes: tuple[int, ...]
    few: tuple[bool, ...]
    blocks: Blocks | Whole
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        parameters: Sequence[tuple[torch.Size, int]],
        blocks: Blocks | Whole,
        dtype: torch.dtype,
    ) -> "Format":
        """The format for parameters of these shapes, with this many elements in a message."""
        few = (in_few_bits(tuple(shape)) for shape, _ in parameters)
        return cls(tuple(size for _, size in parameters), tuple(few), blocks, dtype)

    def sending(self, blocks: Blocks | Whole) -> "Format":
        """The same with other blocks."""
        return replace(self, blocks=blocks)

    def pack(self, x_ABN: Tensor) -> Tensor:
        """[A, B, N] -> [R, M] bytes, R = A x B."""
        assert x_ABN.shape[2] == sum(self.sizes), "every parameter of the unit is sent"
        ways = self._ways(x_ABN)
        lengths = [length for *_, length in ways]
        messages = x_ABN.shape[0] * x_ABN.shape[1]
        sent = x_ABN.new_empty(messages, sum(lengths), dtype=torch.uint8)
        for (way, runs, _), part in zip(ways, sent.split(lengths, 1), strict=True):
            way.pack_runs(runs, part)
        return sent

    def unpack(self, sent_PRM: Tensor, out_RN: Tensor) -> Tensor:
        """[P, R, M], added up over P in order, -> `out_RN`."""
        ways = self._ways(out_RN)
        parts = sent_PRM.split([length for *_, length in ways], 2)
        for (way, runs, _), part in zip(ways, parts, strict=True):
            way.unpack_runs(part, runs)
        return out_RN

    def _ways(self, x: Tensor) -> list[tuple[Blocks | Whole, list[Tensor], int]]:
        """For matrices, then vectors (if any): their encoding, their runs in `x` (last dim: that of
        a message), and their bytes."""
        runs: dict[bool, list[Tensor]] = {True: [], False: []}
        at = 0
        for few, sizes in groupby(zip(self.few, self.sizes, strict=True), key=itemgetter(0)):
            start, at = at, at + sum(size for _, size in sizes)
            if at > start:
                runs[few].append(x[..., start:at])
        ways: dict[bool, Blocks | Whole] = {True: self.blocks, False: Whole(self.dtype)}
        return [
            (ways[few], own, ways[few].length(sum(run.shape[-1] for run in own)))
            for few, own in runs.items()
            if own
        ]


def _by_kernels(x: Tensor) -> bool:
    return runs_triton(x) and x.dtype != torch.float64


def _joined(runs: Sequence[Tensor]) -> Tensor:
    """Runs [A, B, N] concatenated: [A x B, sum of N]."""
    return torch.cat(tuple(runs), 2).flatten(0, 1)


def _unpack_each(way: Blocks | Whole, sent_PRM: Tensor, runs: Sequence[Tensor]) -> None:
    """Messages one by one, added up in order, into their runs."""
    sizes = [run.shape[1] for run in runs]
    each = [way.unpack(sent_RM, sum(sizes), runs[0].dtype) for sent_RM in sent_PRM]
    values = sum_in_order(each) if len(each) > 1 else each[0]
    for run, value in zip(runs, values.split(sizes, 1), strict=True):
        run.copy_(value)
