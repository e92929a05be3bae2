"""Predicts the times of collectives on the links between the ranks of a group.

Ranks lie on GPUs in order, so a group of `size` ranks that are `stride` apart has
min(size, gpus_per_node / stride) of them in each node. Where these do not divide each other, groups
lie across the edges of hosts, and the group that has fewest ranks in a node counts; of a rack's
hosts, jobs take as many as divide their groups (64 GPUs of an NVL72). A ring (or a hierarchy of
rings) then passes the buffer over every link once: inside the node at NVLink's rate, between nodes
at that of as many NICs as the group has GPUs in a node; the slower of the two counts, since they
are pipelined.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, log2

from fivefold.config.model import ModelConfig
from fivefold.description.expert_rows import rows_sent
from fivefold.predict.cluster import Cluster


@dataclass(frozen=True)
class GroupSpan:
    """The placement of a group's ranks on nodes.

    Attributes:
        size: number of ranks.
        inner: number of ranks in each node, or in that of the fewest.
    """

    size: int
    inner: int

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return -(-self.size // self.inner)


def span(cluster: Cluster, size: int, stride: int) -> GroupSpan:
    """The placement of `size` ranks that are `stride` apart."""
    each = cluster.gpus_per_node
    if cluster.is_rack:
        return GroupSpan(size, max(1, min(size, each // stride)))
    groups = max(1, cluster.num_gpus // (size * stride))
    return GroupSpan(size, _fewest(each, size, stride, groups))


@lru_cache(maxsize=1 << 16)
def _fewest(each: int, size: int, stride: int, groups: int) -> int:
    """Fewest ranks of a group in any of its nodes of `each` GPUs, for `groups` groups of this
    `stride`."""
    block = size * stride
    if size == 1 or stride >= each:
        return 1
    if each % stride == 0 and (each % block == 0 or block % each == 0):
        return min(size, each // stride)
    fewest, length = size, (size - 1) * stride
    for number in range(min(groups, each // gcd(each, block))):
        start = number * block % each
        # Groups that begin a GPU later have fewer ranks in their first node, and more in the last.
        turns = {0, stride - 1, each - start - 1, each - start, -(start + length) % each}
        for first in (start + turn for turn in turns if turn < stride):
            begin, last = first % each, first % each + length
            if last >= each:
                ends = -(-(each - begin) // stride), last % each // stride + 1
                fewest = min(fewest, *ends, each // stride if last >= 2 * each else size)
    return fewest


def _rate(cluster: Cluster, group: GroupSpan) -> float:
    """Bytes/s of a ring over the group."""
    network = group.inner * cluster.network_link.rate
    if group.nodes == 1:
        return cluster.node_link.rate
    return network if group.inner == 1 else min(cluster.node_link.rate, network)


def _ring_latency(cluster: Cluster, group: GroupSpan) -> float:
    """Seconds of latency of a ring that visits one node after the other, as in NCCL's tuner."""
    inside = (group.size - group.nodes) * cluster.node_link.latency
    return inside + (group.nodes - 1) * cluster.network_link.latency


# Seconds in which a broadcast's chain gets past a rank, in a node and across nodes: chunks of large
# messages, by NCCL's tuner (`hwLatencies` of its tuning.cc).
_CHAIN, _CHAIN_ACROSS = 4e-6, 14e-6


def gather(cluster: Cluster, group: GroupSpan, size: float) -> float:
    """Seconds of an all-gather, or of a ring's reduce-scatter, of a buffer of `size` bytes."""
    if group.size == 1:
        return 0.0
    sent = (group.size - 1) / group.size * size
    return sent / _rate(cluster, group) + _ring_latency(cluster, group)


def reduce_scatter(
    cluster: Cluster, group: GroupSpan, size: float, *, in_pairs: bool = False
) -> float:
    """Seconds of a reduce-scatter of `size` bytes: a ring, or an all-to-all and a local sum.

    In an all-to-all each rank sends its share for every other node over its own NIC, where a
    hierarchy of rings adds up the shares of a node first.
    """
    if not in_pairs:
        return gather(cluster, group, size)
    share = size / group.size
    inside, across = share * (group.inner - 1), share * (group.size - group.inner)
    return all_to_all(cluster, group, inside, across)


def all_reduce(cluster: Cluster, group: GroupSpan, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes, by a ring or a tree, whichever is faster."""
    if group.size == 1:
        return 0.0
    ring = 2 * gather(cluster, group, size)
    hops = log2(group.inner) * cluster.node_link.latency if group.inner > 1 else 0.0
    hops += log2(group.nodes) * cluster.network_link.latency if group.nodes > 1 else 0.0
    return min(ring, 2 * hops + 2 * size / _rate(cluster, group))


def broadcasts(cluster: Cluster, group: GroupSpan, size: float, messages: int) -> float:
    """Seconds for all ranks to broadcast their parts of `size` bytes: each message is a chain
    through all ranks, one after the other."""
    if group.size == 1:
        return 0.0
    hop = _CHAIN if group.nodes == 1 else _CHAIN_ACROSS
    return size / _rate(cluster, group) + messages * group.size * hop


def all_to_all(cluster: Cluster, group: GroupSpan, inside: float, across: float) -> float:
    """Seconds of an all-to-all, in which both kinds of link work at the same time.

    Args:
        cluster: cluster with the links.
        group: placement of the ranks.
        inside: bytes that a rank sends to ranks of its node.
        across: bytes that a rank sends to other nodes.
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


def hop_seconds(cluster: Cluster, ranks: int, stride: int, size: float) -> float:
    """Seconds of a message between neighbouring pipeline ranks, which are `stride` apart."""
    return send(cluster, stride, size) if ranks > 1 else 0.0


def token_copies(
    model: ModelConfig, group: GroupSpan, dispatcher: str, share: float | None
) -> tuple[float, float]:
    """Mean number of copies of a token that are sent within its node, and to other nodes.

    alltoall sends one copy to each chosen expert; flex one to each rank, and one to each node.

    Args:
        model: model with the experts.
        group: placement of the expert-parallel ranks.
        dispatcher: value of moe_token_dispatcher_type.
        share: rows that every rank gets over their even share, where that is fixed.
    """
    topk = model.moe_router_topk
    if dispatcher == "allgather":
        return group.inner - 1.0, float(group.size - group.inner)
    if share is not None:
        each = share * topk / group.size
        each = min(each, 1.0) if dispatcher == "flex" else each
        return each * (group.inner - 1), each * (group.size - group.inner)
    if dispatcher == "alltoall":
        return topk * (group.inner - 1) / group.size, topk * (group.size - group.inner) / group.size
    inside, across = (rows_sent("flex", model, n) for n in (group.size, group.nodes))
    return inside, across
