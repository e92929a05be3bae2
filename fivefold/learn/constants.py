"""The machine constants that runs can determine, and their uncertainty beforehand."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp
from types import MappingProxyType
from typing import Any

from fivefold.hardware import GPUS
from fivefold.predict.cluster import Cluster
from fivefold.predict.cluster_file import within_range

_LEAST_LOST, _MOST_LOST = 0.02, 0.98  # shares between which odds say something


@dataclass(frozen=True)
class Constant:
    """A constant of a cluster, changed by a factor; a rate and the times that follow from it change
    together.

    Attributes:
        name: name for people.
        of: its value.
        moved: the cluster in which it is this factor of what it was; one that is a share of
            overlapped time has odds of this factor.
        sure: standard deviation of the logarithm of its factor where the kind of GPU is known,
            whose constants are from data sheets and published runs.
        unsure: the same elsewhere, as on CPUs, whose ranks share cores.
        shown: unit in which people read it, and what one is in ours.
    """

    name: str
    of: Callable[[Cluster], float]
    moved: Callable[[Cluster, float], Cluster]
    sure: float
    unsure: float
    shown: tuple[str, float]

    def doubt(self, cluster: Cluster) -> float:
        """Standard deviation of the logarithm of its factor before any run is known."""
        return self.sure if cluster.gpu.name in GPUS else self.unsure


def _scaled(*paths: str) -> Callable[[Cluster, float], Cluster]:
    """Scales fields of a cluster together, such as "gpu.launch", within the limits of a cluster
    file."""

    def moved(cluster: Cluster, factor: float) -> Cluster:
        for path in paths:
            holder, _, name = path.rpartition(".")
            part: Any = getattr(cluster, holder) if holder else cluster
            part = replace(part, **{name: within_range(name, getattr(part, name) * factor)})
            changed: dict[str, Any] = {holder: part}
            cluster = replace(cluster, **changed) if holder else part
        return cluster

    return moved


def _overlap(cluster: Cluster, factor: float) -> Cluster:
    """Scales the odds of the share of overlapped time that is lost."""
    if factor == 1.0:
        return cluster
    lost = min(max(cluster.gpu.overlap_slowdown, _LEAST_LOST), _MOST_LOST)
    odds = lost / (1 - lost) * factor
    return replace(cluster, gpu=replace(cluster.gpu, overlap_slowdown=odds / (1 + odds)))


_GB, _US = ("GB/s", 1e9), ("us", 1e-6)
CONSTANTS: tuple[Constant, ...] = (
    Constant(
        "rate of matrix products",
        lambda c: c.gpu.matmul.bf16 * c.gpu.sustained,
        _scaled("gpu.sustained", "gpu.sustained_narrow"),
        0.10,
        0.8,
        ("TFLOP/s in bf16", 1e12),
    ),
    Constant(
        "rate of attention",
        lambda c: c.gpu.peak.bf16 * c.gpu.attention_forward,
        _scaled("gpu.attention_forward", "gpu.attention_backward"),
        0.15,
        0.8,
        ("TFLOP/s in bf16, forward", 1e12),
    ),
    Constant(
        "rate of memory",
        lambda c: c.gpu.memory_bandwidth * c.gpu.memory_efficiency,
        _scaled("gpu.memory_efficiency"),
        0.10,
        0.6,
        _GB,
    ),
    Constant("time between kernels", lambda c: c.gpu.launch, _scaled("gpu.launch"), 0.4, 1.5, _US),
    Constant(
        "host time of an operation",
        lambda c: c.host_operation,
        _scaled("host_operation"),
        0.4,
        1.0,
        _US,
    ),
    Constant(
        "computation lost beside messages",
        lambda c: c.gpu.overlap_slowdown,
        _overlap,
        0.8,
        1.0,
        ("%", 1e-2),
    ),
    Constant(
        "bandwidth in a node",
        lambda c: c.node_link.rate,
        _scaled("node_link.bandwidth"),
        0.15,
        0.8,
        _GB,
    ),
    Constant(
        "latency in a node",
        lambda c: c.node_link.latency,
        _scaled("node_link.latency"),
        0.5,
        1.2,
        _US,
    ),
    Constant(
        "bandwidth between nodes",
        lambda c: c.network_link.rate,
        _scaled("network_link.bandwidth"),
        0.3,
        0.8,
        _GB,
    ),
    Constant(
        "latency between nodes",
        lambda c: c.network_link.latency,
        _scaled("network_link.latency"),
        0.5,
        1.2,
        _US,
    ),
    Constant(
        "copies to the host", lambda c: c.host_bandwidth, _scaled("host_bandwidth"), 0.2, 0.6, _GB
    ),
)
"""All of them. The doubts are stated, not fitted: those of a known GPU's rates are about what
published runs leave (`benchmarks/intervals.py`), those of times some half, and where the kind of
device is not known each may be some times what a short measurement says."""

UNEXPLAINED: Mapping[bool, float] = MappingProxyType({True: 0.05, False: 0.25})
"""What constants do not explain of a layout's step before any run is known, as the standard
deviation of its logarithm; by whether the kind of GPU is known."""


def moved(cluster: Cluster, shifts: Iterable[float]) -> Cluster:
    """The cluster with its constants changed by these logarithms, one for each of `CONSTANTS`."""
    for constant, shift in zip(CONSTANTS, shifts, strict=True):
        cluster = constant.moved(cluster, exp(shift))
    return cluster
