"""The constants of a machine that runs on it can teach, and how far each may be off beforehand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from types import MappingProxyType
from typing import Any

from fivefold.hardware import GPUS, Gpu
from fivefold.predict.cluster import Cluster, Link, within_range

_LEAST_LOST, _MOST_LOST = 0.02, 0.98  # shares between which odds say something


@dataclass(frozen=True)
class Constant:
    """A constant of a cluster, moved by factors; a rate and the times it gives move as one.

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


def _of_gpu(*names: str) -> Callable[[Cluster, float], Cluster]:
    """Moves fields of the GPU together, within what a cluster's file may say."""

    def moved(cluster: Cluster, factor: float) -> Cluster:
        gpu = cluster.gpu
        values: dict[str, Any] = {
            name: within_range(name, getattr(gpu, name) * factor) for name in names
        }
        return replace(cluster, gpu=replace(gpu, **values))

    return moved


def _of_link(which: str, name: str) -> Callable[[Cluster, float], Cluster]:
    def moved(cluster: Cluster, factor: float) -> Cluster:
        link: Link = getattr(cluster, which)
        value = within_range(name, getattr(link, name) * factor)
        changed: dict[str, Any] = {which: replace(link, **{name: value})}
        return replace(cluster, **changed)

    return moved


def _of_cluster(name: str) -> Callable[[Cluster, float], Cluster]:
    def moved(cluster: Cluster, factor: float) -> Cluster:
        changed: dict[str, Any] = {name: within_range(name, getattr(cluster, name) * factor)}
        return replace(cluster, **changed)

    return moved


def _lost(gpu: Gpu) -> float:
    return min(max(gpu.overlap_slowdown, _LEAST_LOST), _MOST_LOST)


def _overlap(cluster: Cluster, factor: float) -> Cluster:
    if factor == 1.0:
        return cluster
    lost = _lost(cluster.gpu)
    odds = lost / (1 - lost) * factor
    return replace(cluster, gpu=replace(cluster.gpu, overlap_slowdown=odds / (1 + odds)))


CONSTANTS: tuple[Constant, ...] = (
    Constant(
        "rate of matrix products",
        lambda c: c.gpu.matmul.bf16 * c.gpu.sustained,
        _of_gpu("sustained", "sustained_narrow"),
        0.10,
        0.8,
        ("TFLOP/s in bf16", 1e12),
    ),
    Constant(
        "rate of attention",
        lambda c: c.gpu.peak.bf16 * c.gpu.attention_forward,
        _of_gpu("attention_forward", "attention_backward"),
        0.15,
        0.8,
        ("TFLOP/s in bf16, forward", 1e12),
    ),
    Constant(
        "rate of memory",
        lambda c: c.gpu.memory_bandwidth * c.gpu.memory_efficiency,
        _of_gpu("memory_efficiency"),
        0.10,
        0.6,
        ("GB/s", 1e9),
    ),
    Constant(
        "time between kernels", lambda c: c.gpu.launch, _of_gpu("launch"), 0.4, 1.5, ("us", 1e-6)
    ),
    Constant(
        "host time of an operation",
        lambda c: c.host_operation,
        _of_cluster("host_operation"),
        0.4,
        1.0,
        ("us", 1e-6),
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
        _of_link("node_link", "bandwidth"),
        0.15,
        0.8,
        ("GB/s", 1e9),
    ),
    Constant(
        "latency in a node",
        lambda c: c.node_link.latency,
        _of_link("node_link", "latency"),
        0.5,
        1.2,
        ("us", 1e-6),
    ),
    Constant(
        "bandwidth between nodes",
        lambda c: c.network_link.rate,
        _of_link("network_link", "bandwidth"),
        0.3,
        0.8,
        ("GB/s", 1e9),
    ),
    Constant(
        "latency between nodes",
        lambda c: c.network_link.latency,
        _of_link("network_link", "latency"),
        0.5,
        1.2,
        ("us", 1e-6),
    ),
    Constant(
        "copies to the host",
        lambda c: c.host_bandwidth,
        _of_cluster("host_bandwidth"),
        0.2,
        0.6,
        ("GB/s", 1e9),
    ),
)
"""All of them. The doubts are stated, not fitted: those of a known GPU's rates are about what
published runs leave (`benchmarks/intervals.py`), those of times some half, and where the kind of
device is not known each may be some times what a short measurement says."""

UNEXPLAINED: Mapping[bool, float] = MappingProxyType({True: 0.05, False: 0.25})
"""What constants do not explain of a layout's step before any run is known, as the standard
deviation of its logarithm; by whether the kind of GPU is known."""


def moved(cluster: Cluster, shifts: Sequence[float]) -> Cluster:
    """The cluster whose constants are moved by logarithms, one for each of `CONSTANTS`."""
    for constant, shift in zip(CONSTANTS, shifts, strict=True):
        cluster = constant.moved(cluster, exp(shift))
    return cluster
