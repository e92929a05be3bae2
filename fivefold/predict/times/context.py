"""Predicts the cost of each kind of context-parallel communication, and chooses the fastest.

A ring, alone or combined with an exchange of heads, overlaps each hop with the attention on the
block that the hop before has brought. Gathers and exchanges are exposed. With s/c tokens of a
sequence on a rank, a and k query and key/value heads, F the FLOP/s of attention and B the bytes/s
of the link, causal hops are hidden when s/c >= 2 (k/a) F/B: the balanced order leaves half of every
block to compute.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fivefold.check import lacking
from fivefold.config.config import Config
from fivefold.config.divisors import divisors
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import CpCommType
from fivefold.counts.messages import PassVolumes, context_volumes
from fivefold.description.core_attention import CoreAttention
from fivefold.description.layers import describe_layer
from fivefold.errors import Mistakes
from fivefold.mesh.rules import check_context
from fivefold.predict.cluster import Cluster
from fivefold.predict.times.communication import all_to_all, gather, send, span
from fivefold.predict.times.compute import Phases, attention, overlapped

ELEMENT, SUMMED = 2, 4  # bytes of keys and values, and of gradients that a ring sums on their way


@dataclass(frozen=True)
class ContextWay:
    """One kind of context-parallel communication in a layout, for one layer and microbatch.

    Attributes:
        kind: kind of communication, a value of cp_comm_type.
        sizes: sizes of the inner and outer group of a2a+p2p.
        sent: bytes that a rank sends.
        attention: seconds of attention itself.
        exposed: seconds of communication that nothing hides.
        tokens: tokens of a sequence that a rank must have for a ring to hide its forward hops; 0:
            no ring.
    """

    kind: CpCommType
    sizes: tuple[int, ...]
    sent: PassVolumes
    attention: Phases
    exposed: Phases
    tokens: float

    @property
    def name(self) -> str:
        """The kind with the sizes of its groups, such as 'a2a+p2p 8x2'."""
        return self.kind + (f" {self.sizes[0]}x{self.sizes[1]}" if self.sizes else "")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that select it, by field name."""
        return {"cp_comm_type": (self.kind,), "hierarchical_context_parallel_sizes": self.sizes}

    @property
    def seconds(self) -> float:
        """Seconds of attention and exposed communication, forward and backward."""
        return self.attention.total + self.exposed.total


def context_ways(
    config: Config,
    cluster: Cluster,
    given: frozenset[str] = frozenset(),
    only: Mapping[str, Collection[Any]] = MappingProxyType({}),
) -> list[ContextWay]:
    """Every legal kind of communication for this layout, the fastest first."""
    ways = [
        context_way(config, cluster, kinds[0], sizes)
        for kinds, sizes in legal_ways(config, given, only)
    ]
    return sorted(ways, key=lambda way: way.seconds)


def best_context(
    config: Config,
    cluster: Cluster,
    given: frozenset[str] = frozenset(),
    only: Mapping[str, Collection[Any]] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """The settings of the fastest legal kind of communication, with the given settings kept.

    Kinds that the trainer has beside all else come first.
    """
    ways = context_ways(config, cluster, given, only)
    best = min(ways, key=lambda way: lacking(config.with_values(**way.settings)))
    kinds = config.parallel.cp_comm_type
    return best.settings | ({"cp_comm_type": kinds} if len(kinds) > 1 else {})


def configured_ways(config: Config, cluster: Cluster) -> list[tuple[ContextWay, float]]:
    """The kinds of communication of the layers with softmax attention, each with its share of
    them."""
    sizes = config.parallel.hierarchical_context_parallel_sizes
    layers = config.model.softmax_layers
    found = Counter(map(config.parallel.cp_comm_of, layers))
    return [
        (
            context_way(config, cluster, kind, sizes if kind == "a2a+p2p" else ()),
            count / len(layers),
        )
        for kind, count in found.items()
    ]


def legal_ways(
    config: Config,
    given: frozenset[str],
    only: Mapping[str, Collection[Any]] = MappingProxyType({}),
) -> Iterator[tuple[tuple[CpCommType, ...], tuple[int, ...]]]:
    """The legal kinds of communication with the sizes of their groups.

    Args:
        config: configuration with the degrees.
        given: names of the settings that must stay as they are.
        only: the values to choose from, by the name of the setting.
    """
    parallel, cp = config.parallel, config.parallel.context_parallel_size
    kinds: list[tuple[CpCommType, ...]] = [("p2p",), ("all_gather",), ("a2a",), ("a2a+p2p",)]
    if "cp_comm_type" in given:
        kinds = [parallel.cp_comm_type]
    kinds = [kind for kind in kinds if kind in only.get("cp_comm_type", kinds)]
    for kind in kinds:
        sizes: list[tuple[int, ...]] = [()]
        if "hierarchical_context_parallel_sizes" in given:
            sizes = [parallel.hierarchical_context_parallel_sizes]
        elif "a2a+p2p" in kind:
            sizes = [(inner, cp // inner) for inner in divisors(cp) if 1 < inner < cp]
        for each in sizes:
            asked = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": each}
            mistakes = Mistakes()
            changed = config.with_values(**asked)
            check_context(changed, changed.parallel, mistakes)
            if not mistakes.found:
                yield kind, each


def context_way(
    config: Config, cluster: Cluster, kind: CpCommType, sizes: tuple[int, ...]
) -> ContextWay:
    """The cost of a kind of communication for one layer and microbatch.

    Args:
        config: configuration with the degrees.
        cluster: the hardware.
        kind: kind of communication.
        sizes: sizes of the groups of a2a+p2p.
    """
    cp, tp = config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    inner = {"a2a": cp, "a2a+p2p": sizes[0] if sizes else 1}.get(kind, 1)
    work = _attention(config, cluster, cp // inner)
    sent = _volumes(config, kind, cp, inner)
    if kind == "all_gather":
        group = span(cluster, cp, tp)
        whole = gather(cluster, group, sent.forward * cp / max(cp - 1, 1))
        return ContextWay(kind, sizes, sent, work, Phases(whole, 2 * whole), 0.0)
    swapped = _volumes(config, "a2a", inner, inner)
    swap = exchange(cluster, inner, tp, swapped.forward)
    hops = cp // inner - 1
    if not hops:
        return ContextWay(kind, sizes, sent, work, Phases(swap, swap), 0.0)
    ring = span(cluster, hops + 1, tp * inner)
    stride = tp * inner if ring.nodes == 1 else cluster.gpus_per_node
    there, back = (
        send(cluster, stride, (whole - part) / hops)
        for whole, part in (
            (sent.forward, swapped.forward),
            (sent.backward, swapped.backward),
        )
    )
    forward = overlapped(cluster.gpu, work.forward / (hops + 1), there)
    backward = overlapped(cluster.gpu, work.dx / (hops + 1), back)
    exposed = Phases(swap + hops * forward, swap + hops * backward)
    tokens = config.training.seq_length / cp * there * (hops + 1) / work.forward
    return ContextWay(kind, sizes, sent, work, exposed, tokens)


def exchange(cluster: Cluster, ranks: int, stride: int, size: float) -> float:
    """Seconds of an all-to-all in which each rank sends `size` bytes in total."""
    if ranks == 1:
        return 0.0
    group = span(cluster, ranks, stride)
    near = size * (group.inner - 1) / (ranks - 1)
    return all_to_all(cluster, group, near, size - near)


def _attention(config: Config, cluster: Cluster, pieces: int) -> Phases:
    """Seconds of a rank's causal attention, with each sequence split into this many pieces.

    Those of a mean layer: models have windows or chunks in every layer, or in turns, so that stages
    have as many. Queries that see few keys fill the device as little as those of a short sequence.
    """
    model, training, parallel = config.model, config.training, config.parallel
    tokens = config.rank_tokens
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    whole = config.attended_length
    found = Phases()
    for layer, share in _mean_layer(model).items():
        own = model.as_in(layer)
        features = own.query_dim + own.value_dim
        seen = 2 * model.reach_of(layer).mean_keys(whole)
        length = min(training.seq_length // pieces, int(seen))
        each = attention(
            cluster.gpu, tokens * seen * heads * features, length, training.precision, features / 2
        )
        found += each * share
    return found


@lru_cache(maxsize=16)
def _mean_layer(model: ModelConfig) -> Mapping[int, float]:
    """The first layer of each kind of softmax attention, and the share of layers of that kind."""
    layers = model.softmax_layers
    kinds = [(model.reach_of(layer), model.is_local(layer)) for layer in layers]
    counts = Counter(kinds)
    shares = {layers[kinds.index(kind)]: n / len(layers) for kind, n in counts.items()}
    return MappingProxyType(shares)


def _volumes(config: Config, kind: CpCommType, ranks: int, inner: int) -> PassVolumes:
    """Bytes that a rank sends for a mean layer and a microbatch."""
    model, tokens = config.model, config.rank_tokens
    tp = config.parallel.tensor_model_parallel_size
    found = PassVolumes(0.0, 0.0)
    for layer, share in _mean_layer(model).items():
        own, core = model.as_in(layer), describe_layer(model, layer).one(CoreAttention)
        sent = context_volumes(
            kind,
            ranks,
            query=tokens * (own.q_size + own.attention_size) / tp,
            key_value=tokens * core.key_value_features(tp, gathered=kind == "all_gather"),
            element=ELEMENT,
            grad_element=ELEMENT if kind == "all_gather" else SUMMED,
            key_value_heads=own.kv_heads_of(tp),
            inner=inner,
        )
        forward, backward = found.forward + share * sent.forward, share * sent.backward
        found = PassVolumes(forward, found.backward + backward)
    return found
