"""The weights and gradients that ZeRO++ sends in few bits, and their bytes; torch-free.

ZeRO++ (Wang et al., 2023) sends weights as INT8 (qwZ) and gradients as INT4 (qgZ), each block of
elements with a scale of its own. Vectors, such as norms and biases, keep their type: they are few,
and what one step of a block's scale changes in them is not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fivefold.config.parallel import ParallelConfig

BLOCK = 128
"""Number of elements that share a scale."""
SCALE_BYTES = 4
WEIGHT_BITS, GRADIENT_BITS = 8, 4


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dim that shards of a parameter split: for fewer experts than shards dim 1, if it divides;
    else dim 0."""
    return int(len(shape) > 2 and shape[0] % shards > 0 and shape[1] % shards == 0)


def in_few_bits(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this shape is sent in blocks."""
    return len(shape) > 1


def in_block(bits: int) -> float:
    """Bytes per element with this many bits, including its part of the block's scale."""
    return bits / 8 + SCALE_BYTES / BLOCK


@dataclass(frozen=True)
class UnitSizes:
    """Elements of a unit's parameters that one rank sends to one other.

    Attributes:
        blocks: elements of the parameters that are sent in few bits.
        wide: elements of the parameters that keep their type.
        narrow: elements of the parameters that are gathered in the 8 bits in which they are
            multiplied (fp8_param_gather); they are among `blocks`.
    """

    blocks: int
    wide: int
    narrow: int

    @classmethod
    def of(cls, parameters: Iterable[tuple[tuple[int, ...], int]], narrow: int = 0) -> "UnitSizes":
        """The sizes of parameters with these shapes and numbers of elements."""
        each = list(parameters)
        few = sum(size for shape, size in each if in_few_bits(shape))
        return cls(few, sum(size for _, size in each) - few, narrow)

    @classmethod
    def whole(cls, shapes: Iterable[tuple[int, ...]], narrow: int = 0) -> "UnitSizes":
        """The sizes of whole parameters."""
        return cls.of(((shape, prod(shape)) for shape in shapes), narrow)

    def message(self, bits: int, element: float) -> float:
        """Bytes of the message: whole blocks with their scales, and the rest.

        Args:
            bits: bits of an element in a block.
            element: bytes of one that keeps its type.
        """
        blocks = -(-self.blocks // BLOCK)
        return blocks * (BLOCK * bits // 8 + SCALE_BYTES) + self.wide * element

    def gathered(self, element: float, *, rounded: bool) -> float:
        """Bytes of a gather's message, as INT8 (qwZ) or unchanged."""
        if rounded:
            return self.message(WEIGHT_BITS, element)
        return (self.blocks + self.wide - self.narrow) * element + self.narrow


UNPACKING = 4.0
"""Bytes per weight when a gathered message has become a layer's weights: in the compute type, and
the copy of that. The message itself is free by then."""


def reduction_buffers(parallel: ParallelConfig) -> float:
    """Bytes per gradient for qgZ while it sends a layer's: two messages, and a node's sum in
    fp32."""
    if not parallel.zero_quantized_gradients:
        return 0.0
    node = parallel.zero_qgz_partition_size
    return 2 * in_block(GRADIENT_BITS) + (4 / node if node > 1 else 0)
