"""How context parallelism communicates: what each way sends, what of it is exposed, which is best.

A ring, inside or outside of an exchange of heads, sends each hop beside the attention on what came
with the hop before; gathers and exchanges are waited for. With s/c tokens of a sequence on a rank,
a and k query and key/value heads, F the attention's FLOP/s and B the link's bytes/s, causal hops
hide when s/c >= 2 (k/a) F/B: the balanced order leaves half of every block to compute.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.config.config import Config
from fivefold.config.parallel import CpCommType
from fivefold.errors import Mistakes
from fivefold.mesh.rules import check_context, divisors
from fivefold.plan.cluster import Cluster
from fivefold.plan.communication import all_to_all, gather, send, span
from fivefold.plan.compute import Phases, attention, overlapped
from fivefold.volumes import PassVolumes, context_volumes

ELEMENT, SUMMED = 2, 4  # bytes of keys and values, and of gradients that a ring sums on their way
SETTINGS = frozenset({"cp_comm_type", "hierarchical_context_parallel_sizes"})
"""Where one of them is given, no other way is tried."""


@dataclass(frozen=True)
class ContextWay:
    """One way on one layout, for a layer and microbatch.

    Attributes:
        kind: of communication.
        sizes: ranks of the inner and outer group of a2a+p2p.
        sent: bytes that a rank sends.
        attention: seconds of attention itself.
        exposed: seconds of communication that nothing hides.
        tokens: of a sequence that a rank must have for a ring to hide its forward hops; 0: no ring.
    """

    kind: CpCommType
    sizes: tuple[int, ...]
    sent: PassVolumes
    attention: Phases
    exposed: Phases
    tokens: float

    @property
    def name(self) -> str:
        """'a2a+p2p 8x2'."""
        return self.kind + (f" {self.sizes[0]}x{self.sizes[1]}" if self.sizes else "")

    @property
    def settings(self) -> dict[str, Any]:
        """That ask for it."""
        found: dict[str, Any] = {"cp_comm_type": (self.kind,)}
        return found | {"hierarchical_context_parallel_sizes": self.sizes}

    @property
    def seconds(self) -> float:
        """Of attention and what is exposed, forward and backward."""
        return self.attention.total + self.exposed.total


def context_ways(config: Config, cluster: Cluster) -> list[ContextWay]:
    """Every way that the rules let pass on this layout, the fastest first."""
    ways = [context_way(config, cluster, *way) for way in _legal(config)]
    return sorted(ways, key=lambda way: way.seconds)


def best_context(config: Config, cluster: Cluster) -> Mapping[str, Any]:
    """The settings of the fastest way; none if no way is legal."""
    ways = context_ways(config, cluster)
    return ways[0].settings if ways else {}


def configured_way(config: Config, cluster: Cluster) -> ContextWay:
    """The way that a configuration asks for in its first layer."""
    parallel = config.parallel
    kind, sizes = parallel.cp_comm_type[0], parallel.hierarchical_context_parallel_sizes
    return context_way(config, cluster, kind, sizes if kind == "a2a+p2p" else ())


def _legal(config: Config) -> Iterator[tuple[CpCommType, tuple[int, ...]]]:
    cp = config.parallel.context_parallel_size
    tried: list[tuple[CpCommType, tuple[int, ...]]] = [("p2p", ()), ("all_gather", ()), ("a2a", ())]
    tried += [("a2a+p2p", (inner, cp // inner)) for inner in divisors(cp) if 1 < inner < cp]
    for kind, sizes in tried:
        mistakes = Mistakes()
        asked = {"cp_comm_type": (kind,), "hierarchical_context_parallel_sizes": sizes}
        changed = config.with_values(**asked)
        check_context(changed, changed.parallel, mistakes)
        if not mistakes.found:
            yield kind, sizes


def context_way(
    config: Config, cluster: Cluster, kind: CpCommType, sizes: tuple[int, ...] = ()
) -> ContextWay:
    """What a way of communication costs a layer of a layout.

    Args:
        config: with the degrees.
        cluster: on what.
        kind: of communication.
        sizes: of a2a+p2p.
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
    swap = _exchange(cluster, inner, tp, swapped.forward)
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


def _exchange(cluster: Cluster, ranks: int, stride: int, size: float) -> float:
    """Seconds in which each of some ranks sends `size` bytes to all others."""
    if ranks == 1:
        return 0.0
    group = span(cluster, ranks, stride)
    near = size * (group.inner - 1) / (ranks - 1)
    return all_to_all(cluster, group, near, size - near)


def _attention(config: Config, cluster: Cluster, pieces: int) -> Phases:
    """Seconds of a rank's causal attention, whose kernels see sequences in so many pieces."""
    model, training, parallel = config.model, config.training, config.parallel
    tokens = training.micro_batch_size * training.seq_length // parallel.context_parallel_size
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    features = model.query_dim + model.value_dim
    flops = tokens * float(training.seq_length) * heads * features
    length = training.seq_length // pieces
    return attention(cluster.gpu, flops, length, training.precision, features / 2)


def _volumes(config: Config, kind: CpCommType, ranks: int, inner: int) -> PassVolumes:
    """Bytes that a rank sends for a layer and microbatch."""
    model, training, parallel = config.model, config.training, config.parallel
    tp = parallel.tensor_model_parallel_size
    tokens = training.micro_batch_size * training.seq_length // parallel.context_parallel_size
    heads = max(model.num_kv_heads // tp, 1)
    latent = model.kv_lora_rank + model.qk_pos_emb_head_dim
    keys = heads * (model.query_dim + model.value_dim)
    return context_volumes(
        kind,
        ranks,
        query=tokens * (model.q_size + model.attention_size) / tp,
        key_value=tokens * (latent if model.multi_latent_attention else keys),
        element=ELEMENT,
        grad_element=ELEMENT if kind == "all_gather" else SUMMED,
        key_value_heads=heads,
        inner=inner,
    )
