"""Bytes sent by single collectives and single layers, in closed form; torch-free.

Model, for a whole buffer of N bytes, per rank of P: all-gather and reduce-scatter (P-1)/P N,
all-reduce 2 (P-1)/P N, all-to-all (P-1)/P of the rank's data, a message N. These are the bytes of
bandwidth-optimal algorithms, such as NCCL's rings.
"""

from dataclasses import dataclass

from fivefold.config.parallel import CpCommType


@dataclass(frozen=True)
class Flow:
    """Bytes that one rank sends in one step for one purpose.

    Attributes:
        axis: the ranks involved: "tp", "pp", "cp" (also its inner and outer groups), "ep", "etp",
            "ep x etp", "edp" (ranks with the same experts), "edp_shard" and "edp_replicate" (its
            two factors, if both are more than one), "router", "data" (ranks with different
            tokens), "dp_shard_cp" and "dp_replicate" (its two factors), "hpz", "qgz_inner" and
            "qgz_outer" (parts of the ranks that share state, for ZeRO++; of those with the same
            experts "edp_hpz", ...), "holders" and "edp_holders" (those that hold parts of
            the same matrices, and of those of experts), "tied", "mirror", "world".
        purpose: description.
        size: bytes.
    """

    axis: str
    purpose: str
    size: float


def wire_bytes(op: str, size: float, ranks: int) -> float:
    """Bytes that one rank of a group sends in a collective.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all or send.
        size: bytes of the whole buffer: the gathered one, the one to reduce, or the message.
        ranks: size of the group.
    """
    if op == "send":
        return size
    return (2 if op == "all_reduce" else 1) * (ranks - 1) * size / ranks


@dataclass(frozen=True)
class PassVolumes:
    """Bytes that a rank sends for one layer and microbatch, forward and backward."""

    forward: float
    backward: float


def context_volumes(
    kind: CpCommType,
    ranks: int,
    *,
    query: float,
    key_value: float,
    element: int,
    grad_element: int,
    key_value_heads: int = 1,
    inner: int = 1,
    seen: tuple[float, float] | None = None,
) -> PassVolumes:
    """Context-parallel bytes for one attention layer, in closed form.

    With P ranks, and KV the bytes of a rank's own keys and values:
    - p2p (ring): P-1 hops of KV forward; P-1 again in the backward, plus P-1 of dKV, whose
      circulation starts with the first block that is not the rank's own.
    - all_gather: (P-1) KV forward; again in the backward, and dKV reduced.
    - a2a (Ulysses): (P-1)/P of Q, K, V and O, and as much of their gradients. With fewer key/value
      heads than ranks, each head is sent P / heads times.
    - a2a+p2p: a2a within groups of `inner` ranks, and a ring of P / inner groups, in which a rank
      has part of the heads for all tokens of its group: the same bytes as a whole ring step.
    If queries do not see all keys (sliding windows), p2p and all_gather send only visible keys.

    Args:
        kind: cp_comm_type.
        ranks: P.
        query: elements of this rank's queries and attention output together.
        key_value: elements of its keys and values together, or of the latent sent instead.
        element: bytes per element.
        grad_element: bytes per element of dKV as sent.
        key_value_heads: key/value heads on this tensor-parallel rank.
        inner: ranks of the inner group of a2a+p2p.
        seen: multiples of KV that this rank sends and receives because they are visible, in a ring
            of `ranks` or of groups; None: all, one less than the number of ranks or groups.
    """
    keys, grads = key_value * element, key_value * grad_element
    if kind in ("p2p", "all_gather"):
        sent, got = seen or (ranks - 1, ranks - 1)
        return PassVolumes(sent * keys, sent * keys + got * grads)
    exchanging = ranks if kind == "a2a" else inner
    copies = max(1.0, exchanging / key_value_heads)
    moved = (exchanging - 1) / exchanging * (query * element + copies * keys)
    hops = ranks // exchanging - 1
    sent, got = (seen or (hops, hops)) if hops else (0, 0)
    return PassVolumes(
        moved + sent * copies * keys,
        moved + copies * (sent * keys + got * grads),
    )
