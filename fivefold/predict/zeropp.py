"""Predicts the times of ZeRO++: gathers in few bits or within a node, reductions by all-to-all.

Rounding is done by PyTorch's elementwise kernels, one for each operation, which memory limits.
"""

from collections.abc import Sequence

from fivefold.config.config import Config
from fivefold.data_parallel.blocks import GRADIENT_BITS, UnitSizes
from fivefold.hardware import Gpu
from fivefold.layout import Layout
from fivefold.mesh.nodes import NodeSizes
from fivefold.predict.cluster import Cluster
from fivefold.predict.communication import GroupSpan, gather, reduce_scatter, span
from fivefold.predict.compute import elementwise

_PACK, _PACK_KERNELS = 53.0, 13
"""Bytes per element that packing moves: it is joined, widened, its magnitude taken and compared,
divided, rounded, clamped, narrowed, and joined to the scales."""
_UNPACK, _UNPACK_KERNELS = 23.0, 7
"""Bytes per element that unpacking moves: it is widened, multiplied, narrowed, put in its place."""
_SUM = 12.0
"""Bytes per element that a sum of what arrived moves."""
_NARROW, _NARROW_KERNELS = 26.0, 5
"""Bytes per element that narrowing to 8 bits moves: it is cast, scaled, clamped, narrowed, put in
its place."""
_WEIGHT, _GRADIENT = 2.0, 4.0  # bytes of what is not rounded


def gather_seconds(
    layout: Layout,
    cluster: Cluster,
    group: GroupSpan,
    stride: int,
    nodes: NodeSizes,
    shapes: Sequence[tuple[int, ...]],
    narrow: int,
) -> float:
    """Seconds to gather a unit's parameters, the mean of a step's gathers.

    Args:
        layout: the layout.
        cluster: the hardware.
        group: placement of the ranks that share state.
        stride: distance of these ranks.
        nodes: how ZeRO++ divides the group.
        shapes: whole parameters of the unit.
        narrow: elements of those that are gathered in 8 bits.
    """
    parallel, sizes = layout.config.parallel, UnitSizes.whole(shapes, narrow)
    rounded = parallel.zero_quantized_weights and group.size > 1
    message = sizes.gathered(_WEIGHT, rounded=rounded)
    beside = _seconds(cluster.gpu, sizes.blocks, _UNPACK, _UNPACK_KERNELS) if rounded else 0.0
    if narrow:
        beside += _seconds(cluster.gpu, narrow / group.size, _NARROW, _NARROW_KERNELS)
    first = gather(cluster, group, message) + beside
    if rounded:
        first += _seconds(cluster.gpu, sizes.blocks / group.size, _PACK, _PACK_KERNELS)
    if nodes.hpz == 1:
        return first
    often = parallel.sharding.gathers(layout.num_microbatches * parallel.num_sequence_slices)
    later = gather(cluster, span(cluster, nodes.hpz, stride), message) + beside
    return (first + (often - 1) * later) / often


def reduction_seconds(
    cluster: Cluster,
    group: GroupSpan,
    stride: int,
    nodes: NodeSizes,
    shapes: Sequence[tuple[int, ...]],
) -> float:
    """Seconds to reduce a unit's gradients as INT4 (qgZ); arguments as in `gather_seconds`."""
    sizes = UnitSizes.whole(shapes)
    message = sizes.message(GRADIENT_BITS, _GRADIENT)
    hops = [(group, 1)]
    if nodes.qgz > 1:
        inner = span(cluster, nodes.qgz, stride)
        outer = span(cluster, group.size // nodes.qgz, stride * nodes.qgz)
        hops = [(inner, 1), (outer, nodes.qgz)]
    traffic, kernels = _PACK + _UNPACK + _SUM, _PACK_KERNELS + _UNPACK_KERNELS + 1
    return sum(
        reduce_scatter(cluster, ranks, message / share, in_pairs=True)
        + _seconds(cluster.gpu, sizes.blocks / share, traffic, kernels)
        for ranks, share in hops
        if ranks.size > 1
    )


def least_bytes(config: Config) -> tuple[float, float | None]:
    """Bytes that a weight's gather and a gradient's reduction send at least; None: as without."""
    parallel = config.parallel
    narrow = parallel.zero_quantized_weights or config.training.fp8_param_gather
    weight = 1.0 if narrow else _WEIGHT
    return weight, GRADIENT_BITS / 8 if parallel.zero_quantized_gradients else None


def _seconds(gpu: Gpu, elements: float, traffic: float, kernels: int) -> float:
    return elementwise(gpu, elements * traffic, kernels)
