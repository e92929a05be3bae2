"""How long collectives take on the links that a group of ranks really has.

Ranks lie on GPUs in order, so a group of `size` ranks that are `stride` apart has
min(size, gpus_per_node / stride) of them in each node. A ring (or a hierarchy of rings) then passes
the buffer over every link once: inside the node at NVLink's rate, between nodes at that of as many
NICs as the group has GPUs in a node; the slower of the two counts, since they are pipelined.
"""

from dataclasses import dataclass
from math import log2

from fivefold.config.model import ModelConfig
from fivefold.counts.messages import rows_sent
from fivefold.predict.cluster import Cluster


@dataclass(frozen=True)
class GroupSpan:
    """Where the ranks of a group lie.

    Attributes:
        size: ranks.
        inner: ranks of the group in one node.
    """

    size: int
    inner: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.size // self.inner)


def span(cluster: Cluster, size: int, stride: int) -> GroupSpan:
    """A group of `size` ranks, `stride` apart."""
    return GroupSpan(size, max(1, min(size, cluster.gpus_per_node // stride)))


def _rate(cluster: Cluster, group: GroupSpan) -> float:
    """Bytes/s at which a ring over the group runs."""
    network = group.inner * cluster.network_link.rate
    if group.nodes == 1:
        return cluster.node_link.rate
    return network if group.inner == 1 else min(cluster.node_link.rate, network)


def _ring_latency(cluster: Cluster, group: GroupSpan) -> float:
    """A piece visits every rank in turn, one node after the other (as NCCL's own tuner counts)."""
    inside = (group.size - group.nodes) * cluster.node_link.latency
    return inside + (group.nodes - 1) * cluster.network_link.latency


def gather(cluster: Cluster, group: GroupSpan, size: float) -> float:
    """Seconds of an all-gather, or of a reduce-scatter, of a whole buffer of `size` bytes."""
    if group.size == 1:
        return 0.0
    sent = (group.size - 1) / group.size * size
    return sent / _rate(cluster, group) + _ring_latency(cluster, group)


def all_reduce(cluster: Cluster, group: GroupSpan, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes: a ring, or a tree where latency counts for more."""
    if group.size == 1:
        return 0.0
    ring = 2 * gather(cluster, group, size)
    hops = log2(group.inner) * cluster.node_link.latency if group.inner > 1 else 0.0
    hops += log2(group.nodes) * cluster.network_link.latency if group.nodes > 1 else 0.0
    return min(ring, 2 * hops + 2 * size / _rate(cluster, group))


def all_to_all(cluster: Cluster, group: GroupSpan, inside: float, across: float) -> float:
    """Seconds in which every rank sends to all others; both kinds of link work at once.

    Args:
        cluster: cluster with the links.
        group: the ranks.
        inside: bytes that a rank sends to ranks of its node.
        across: bytes that it sends to other nodes.
    """
    if group.size == 1:
        return 0.0
    latency = cluster.node_link.latency * log2(group.inner) if group.inner > 1 else 0.0
    latency += cluster.network_link.latency * log2(group.nodes) if group.nodes > 1 else 0.0
    return max(inside / cluster.node_link.rate, across / cluster.network_link.rate) + latency


def send(cluster: Cluster, stride: int, size: float) -> float:
    """Seconds until `size` bytes have reached the rank `stride` away."""
    link = cluster.node_link if stride < cluster.gpus_per_node else cluster.network_link
    return size / link.rate + link.latency


def token_copies(model: ModelConfig, group: GroupSpan, dispatcher: str) -> tuple[float, float]:
    """Of a token, the copies that stay in its node and those that leave it.

    alltoall sends one to each expert; flex one to each rank, and one to each node.

    Args:
        model: model with the experts.
        group: over which they are spread.
        dispatcher: a value of moe_token_dispatcher_type.
    """
    topk = model.moe_router_topk
    if dispatcher == "allgather":
        return group.inner - 1.0, float(group.size - group.inner)
    if dispatcher == "alltoall":
        return topk * (group.inner - 1) / group.size, topk * (group.size - group.inner) / group.size
    inside, across = (rows_sent("flex", model, n) for n in (group.size, group.nodes))
    return inside, across
