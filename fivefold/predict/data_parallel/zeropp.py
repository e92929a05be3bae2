"""Predicts the times of ZeRO++: gathers in few bits or within a node, reductions by all-to-all.

Memory limits the kernels that round: each number is read once and written once.
"""

from dataclasses import dataclass
from math import prod

from fivefold.config.config import Config
from fivefold.data_parallel.blocks import GRADIENT_BITS, WEIGHT_BITS, UnitSizes, in_block
from fivefold.hardware import Gpu
from fivefold.layout import Layout
from fivefold.mesh.nodes import NodeSizes
from fivefold.predict.cluster import Cluster
from fivefold.predict.times.communication import GroupSpan, gather, reduce_scatter, span
from fivefold.predict.times.compute import elementwise

_PACK_KERNELS, _UNPACK_KERNELS = 4, 5
"""Kernels of a layer, whose matrices lie in two runs: one for each, the rest for its vectors."""
_NARROW, _NARROW_KERNELS = 26.0, 5
"""Bytes per element that narrowing to 8 bits moves: it is cast, scaled, clamped, narrowed, put in
its place."""
_WEIGHT, _GRADIENT = 2.0, 4.0  # bytes of what is not rounded


@dataclass(frozen=True)
class SharedMessage:
    """Parameters that are sent together.

    Attributes:
        group: placement of the ranks that share them.
        stride: ranks between two of these.
        node: how ZeRO++ divides them.
        shapes: their shapes.
        narrow: elements of those that are gathered in 8 bits.
        count: how often a stage has such.
        ends: whether they are those of the model's ends.
        experts: whether they are those of experts.
    """

    group: GroupSpan
    stride: int
    node: NodeSizes
    shapes: tuple[tuple[int, ...], ...]
    narrow: int
    count: int
    ends: bool
    experts: bool

    @property
    def size(self) -> int:
        """Elements."""
        return sum(map(prod, self.shapes))


def gather_seconds(layout: Layout, cluster: Cluster, sent: SharedMessage) -> float:
    """Seconds to gather parameters, the mean of a step's gathers."""
    group, narrow = sent.group, sent.narrow
    parallel, sizes = layout.config.parallel, UnitSizes.whole(sent.shapes, narrow)
    rounded = parallel.zero_quantized_weights and group.size > 1
    message = sizes.gathered(_WEIGHT, rounded=rounded)
    passes = _WEIGHT + in_block(WEIGHT_BITS)
    beside = _seconds(cluster.gpu, sizes.blocks, passes, _UNPACK_KERNELS) if rounded else 0.0
    if narrow:
        beside += _seconds(cluster.gpu, narrow / group.size, _NARROW, _NARROW_KERNELS)
    first = gather(cluster, group, message) + beside
    if rounded:
        first += _seconds(cluster.gpu, sizes.blocks / group.size, passes, _PACK_KERNELS)
    if sent.node.hpz == 1:
        return first
    often = parallel.sharding.gathers(layout.num_microbatches * parallel.num_sequence_slices)
    later = gather(cluster, span(cluster, sent.node.hpz, sent.stride), message) + beside
    return (first + (often - 1) * later) / often


def reduction_seconds(cluster: Cluster, sent: SharedMessage) -> float:
    """Seconds to reduce gradients as INT4 (qgZ)."""
    sizes, node = UnitSizes.whole(sent.shapes), sent.node.qgz
    message = sizes.message(GRADIENT_BITS, _GRADIENT)
    hops = [(sent.group, 1)]
    if node > 1:
        inner = span(cluster, node, sent.stride)
        outer = span(cluster, sent.group.size // node, sent.stride * node)
        hops = [(inner, 1), (outer, node)]
    kernels, packed = _PACK_KERNELS + _UNPACK_KERNELS, 2 * in_block(GRADIENT_BITS)
    return sum(
        reduce_scatter(cluster, ranks, message / share, in_pairs=True)
        + _seconds(
            cluster.gpu, sizes.blocks / share, packed + _GRADIENT * (1 + 1 / ranks.size), kernels
        )
        for ranks, share in hops
        if ranks.size > 1
    )


def least_bytes(config: Config) -> tuple[float, float | None]:
    """Lower bounds on the bytes sent per weight gathered and per gradient reduced; None: as without
    ZeRO++."""
    parallel = config.parallel
    narrow = parallel.zero_quantized_weights or config.training.fp8_param_gather
    weight = 1.0 if narrow else _WEIGHT
    return weight, GRADIENT_BITS / 8 if parallel.zero_quantized_gradients else None


def _seconds(gpu: Gpu, elements: float, traffic: float, kernels: int) -> float:
    return elementwise(gpu, elements * traffic, kernels)
