"""Messages of ZeRO++ (Wang et al., 2023): blocks of integers, each with a scale.

Shapes: R messages, N elements of one, M bytes of one, B blocks of K elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.data_parallel.blocks import BLOCK, SCALE_BYTES, in_few_bits

_TINY = 1e-30  # least largest element that a scale is made for: zeros get a finite one, too
_SIGN = 8  # added to 4-bit integers of -7 to 7, two of which share a byte
_NIBBLE = 16
_EXPONENT = 0x7F800000  # bits of an fp32


@dataclass(frozen=True)
class Blocks:
    """How numbers become blocks of integers, rounded to nearest, ties to even.

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
            low, high = (integers + _SIGN).view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
            integers = low + high * _NIBBLE
        return torch.cat((step_RB.view(torch.uint8), integers.view(torch.uint8)), 1)

    def unpack(self, sent_RM: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """[R, M] -> [R, `elements`] in `dtype`, multiplied in at least fp32."""
        blocks = -(-elements // self.size)
        steps, integers = sent_RM.split((SCALE_BYTES * blocks, self._bytes(blocks)), 1)
        if self.bits == 4:
            pairs = torch.stack((integers % _NIBBLE, integers // _NIBBLE), 2).flatten(1)
            integers = pairs.view(torch.int8) - _SIGN
        wide = torch.promote_types(dtype, torch.float32)
        values = integers.view(torch.int8).to(wide).unflatten(1, (blocks, self.size))
        step_RB = steps.clone(memory_format=torch.contiguous_format).view(torch.float32)
        return values.mul_(step_RB[..., None]).flatten(1)[:, :elements].to(dtype)

    def length(self, elements: int) -> int:
        """Bytes of so many elements."""
        blocks = -(-elements // self.size)
        return SCALE_BYTES * blocks + self._bytes(blocks)

    def rounded(self, x: Tensor) -> Tensor:
        """A tensor as it arrives if it is sent as one message."""
        flat = x.reshape(1, -1)
        return self.unpack(self.pack(flat), flat.shape[1], x.dtype).view_as(x)

    def _bytes(self, blocks: int) -> int:
        return blocks * self.size * self.bits // 8

    def _step(self, step: Tensor) -> Tensor:
        """What the integers of a block stand for multiples of."""
        step = step.clamp(min=_TINY)
        if not self.powers_of_two:
            return step
        power = (step.view(torch.int32) & _EXPONENT).view(torch.float32)
        return torch.where(step > power, power * 2, step)


@dataclass(frozen=True)
class Whole:
    """Elements of `dtype` as they are, in place of blocks."""

    dtype: torch.dtype

    def pack(self, x_RN: Tensor) -> Tensor:
        """[R, N] -> [R, M] bytes."""
        return x_RN.to(self.dtype).contiguous().view(torch.uint8)

    def unpack(self, sent_RM: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """[R, M] -> [R, `elements`] in `dtype`."""
        whole = sent_RM.clone(memory_format=torch.contiguous_format).view(self.dtype)
        assert whole.shape[1] == elements, "the message holds these elements"
        return whole.to(dtype)

    def length(self, elements: int) -> int:
        """Bytes of so many elements."""
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
        """The format for parameters of these shapes, with so many elements in a message."""
        few = (in_few_bits(tuple(shape)) for shape, _ in parameters)
        return cls(tuple(size for _, size in parameters), tuple(few), blocks, dtype)

    def sending(self, blocks: Blocks | Whole) -> "Format":
        """The same with other blocks."""
        return replace(self, blocks=blocks)

    def pack(self, x_RN: Tensor) -> Tensor:
        """[R, N] -> [R, M] bytes."""
        assert x_RN.shape[1] == sum(self.sizes), "every parameter of the unit is sent"
        sent = [
            way.pack(torch.cat([part for part, _ in self._parts(x_RN, few=few)], 1))
            for few, way in self._ways()
        ]
        return torch.cat(sent, 1)

    def unpack(self, sent_RM: Tensor, out_RN: Tensor) -> Tensor:
        """[R, M] -> `out_RN`."""
        at = 0
        for few, way in self._ways():
            targets, sizes = zip(*self._parts(out_RN, few=few), strict=True)
            length = way.length(sum(sizes))
            values = way.unpack(sent_RM[:, at : at + length], sum(sizes), out_RN.dtype)
            for target, value in zip(targets, values.split(sizes, 1), strict=True):
                target.copy_(value)
            at += length
        return out_RN

    def _ways(self) -> Iterator[tuple[bool, Blocks | Whole]]:
        """How matrices are sent, and then vectors, if the unit has any."""
        ways: dict[bool, Blocks | Whole] = {True: self.blocks, False: Whole(self.dtype)}
        sent = {few for few, size in zip(self.few, self.sizes, strict=True) if size}
        return ((few, way) for few, way in ways.items() if few in sent)

    def _parts(self, x_RN: Tensor, *, few: bool) -> Iterator[tuple[Tensor, int]]:
        """The parts of the matrices, or of the vectors, and their sizes."""
        every = zip(x_RN.split(self.sizes, 1), self.sizes, self.few, strict=True)
        return ((part, size) for part, size, each in every if each == few)
