"""Bytes on the wire of single collectives and of single layers, in closed form; torch-free.

Wire model, bytes sent by each of P ranks for a whole buffer of N bytes: all-gather and
reduce-scatter (P-1)/P N, all-reduce 2 (P-1)/P N, all-to-all (P-1)/P of what the rank has, a message
N. These are what bandwidth-optimal algorithms send, and NCCL's rings do.
"""

from dataclasses import dataclass
from math import comb

from fivefold.config.model import ModelConfig
from fivefold.config.parallel import CpCommType, TokenDispatcher


@dataclass(frozen=True)
class Flow:
    """What one rank sends in one step for one purpose.

    Attributes:
        axis: over which ranks: "tp", "pp", "cp" (its inner and outer groups as well), "ep", "etp",
            "ep x etp", "edp" (all that hold the same experts), "edp_shard" and "edp_replicate" (its
            two factors, where both are more than one), "router", "data" (all that see other
            tokens), "dp_shard_cp" and "dp_replicate" (its two factors), "tied", "mirror", "world".
        purpose: purpose in words.
        size: bytes.
    """

    axis: str
    purpose: str
    size: float


def wire_bytes(op: str, size: int, ranks: int) -> float:
    """What one of `ranks` ranks sends.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all or send.
        size: bytes of the whole buffer: the gathered one, the one to be reduced, the message.
        ranks: ranks of the group.
    """
    if op == "send":
        return size
    return (2 if op == "all_reduce" else 1) * (ranks - 1) * size / ranks


@dataclass(frozen=True)
class PassVolumes:
    """Bytes that a rank sends in one layer and microbatch, forward and backward."""

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
    """What context parallelism sends for one attention layer, in closed form.

    With P ranks and KV, the bytes of a rank's own keys and values:
    - p2p (ring): P-1 hops of KV forward; in the backward as many again, and P-1 of dKV, since the
      circulation of dKV starts with the first block that is not the rank's own.
    - all_gather: (P-1) KV forward; gathered again in the backward, and dKV exchanged and summed.
    - a2a (Ulysses): heads for tokens, (P-1)/P of Q, K, V and O; as much of their gradients. With
      fewer key/value heads than ranks each is sent P / heads times.
    - a2a+p2p: a2a inside groups of `inner` ranks, and a ring of P / inner such groups, in which a
      rank has all tokens of its group for a part of the heads: as many bytes as before.
    Where queries do not see all keys (sliding windows), p2p and all_gather send what is seen.

    Args:
        kind: kind of communication.
        ranks: P.
        query: elements of this rank's queries and attention output together.
        key_value: elements of its keys and values together; of the latent where that is sent.
        element: bytes of them.
        grad_element: bytes of an element of dKV on the wire.
        key_value_heads: key/value heads on this rank's tensor-parallel part.
        inner: ranks of the inner group of a2a+p2p.
        seen: how many times KV this rank sends and gets because it is seen, of a ring among `ranks`
            or among the groups; None: all, one less than these.
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


def rows_sent(dispatcher: TokenDispatcher, model: ModelConfig, ranks: int) -> float:
    """Rows that a token sends in one direction to the experts of other ranks, in expectation.

    Of evenly used experts: a row per chosen expert (alltoall), one per rank that holds a chosen one
    (flex, which sends no token twice to a rank), or one to every rank (allgather).

    Args:
        dispatcher: dispatcher of tokens.
        model: model with experts.
        ranks: over which they are spread evenly.
    """
    elsewhere = 1 - 1 / ranks
    if dispatcher == "allgather":
        return ranks - 1
    if dispatcher == "alltoall":
        return model.moe_router_topk * elsewhere
    return ranks * _reached(model, ranks) * elsewhere


def _reached(model: ModelConfig, ranks: int) -> float:
    """The chance that a rank holds one of the experts that a token is sent to.

    A router with groups first chooses some of them, then experts of those.
    """
    experts, topk = model.num_experts or 1, model.moe_router_topk
    groups, chosen = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    each, own = experts // groups, experts // ranks
    pool = chosen * each

    def hit(held: int) -> float:
        """That one of so many experts of the chosen groups is among those of a token."""
        return 1 - comb(pool - held, topk) / comb(pool, topk)

    if own < each:
        return chosen / groups * hit(own)
    spans = own // each  # groups of which all experts lie on the rank
    chances = (
        comb(spans, met) * comb(groups - spans, chosen - met) * hit(met * each)
        for met in range(1, min(spans, chosen) + 1)
    )
    return sum(chances) / comb(groups, chosen)
