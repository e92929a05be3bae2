"""The layout that rules of thumb lead to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.config.config import Config
from fivefold.config.divisors import divisors
from fivefold.errors import ConfigError
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.partitions import balanced_layout
from fivefold.search.request import Request

LIMITED = 12.5e9
"""Bytes/s of network for each GPU below which guides speak of a limited network: 100 Gbit/s."""
LONG = 8192
"""Tokens of a sequence on a rank, beyond which guides advise context parallelism."""
_SEQUENCES = (8, 4, 2, 1)  # micro-batches to try
_FILLING = 4  # microbatches for each pipeline rank, below which the bubble is large


@dataclass(frozen=True)
class Rule:
    """The layout that rules of thumb lead to.

    Attributes:
        candidate: the layout; None if no layout that follows the rules fits.
        steps: the decisions in order, each as a sentence.
    """

    candidate: Candidate | None
    steps: tuple[str, ...]


def rule_of_thumb(request: Request) -> Rule:
    """The layout that the usual advice leads to.

    Context parallelism for long sequences; tensor parallelism inside the node (inside half of it on
    a limited network, which pipelines load less) and as small as fits; then pipeline parallelism
    across nodes; expert parallelism before expert tensor parallelism, inside a node if that fits;
    data parallelism with ZeRO-1 for the rest; recomputation only if nothing else fits; then the
    largest micro-batch that fits and fills the pipeline.
    """
    model, node = request.config.model, request.cluster.gpus_per_node
    widest = min(node, 4) if _is_limited(request) else node
    tensor = [n for n in (1, 2, 4, 8) if n <= widest]
    cp = _context(request)
    meshes = [(tp, 1) for tp in tensor]
    pipelines = [pp for pp in divisors(request.world) if 1 < pp <= model.num_layers]
    meshes += [(tensor[-1], pp) for pp in pipelines]
    expert = divisors(model.num_experts or 1)
    inside = max(n for n in expert if n <= node)
    for recompute in (None, "full"):
        for ep in (n for n in expert if n >= inside):
            for tp, pp in meshes:
                settings = _by_rule(tp, cp, pp, ep, recompute)
                found = _first_fit(request, settings)
                if found is not None:
                    found = _widened(request, settings, found)
                    return Rule(found, tuple(_rule_steps(request, found)))
    return Rule(None, ())


def _is_limited(request: Request) -> bool:
    cluster = request.cluster
    return cluster.nodes > 1 and cluster.network_link.bandwidth < LIMITED


def _context(request: Request) -> int:
    """The smallest power of two with which a rank has at most `LONG` tokens of a sequence."""
    cp = 1
    while request.config.training.seq_length > LONG * cp and request.world % (2 * cp) == 0:
        cp *= 2
    return cp


def _by_rule(tp: int, cp: int, pp: int, ep: int, recompute: str | None) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "data_parallel_sharding_strategy": "optim",
        "num_distributed_optimizer_instances": 1,
        "micro_batch_size": 1,
        "recompute_granularity": recompute,
    }


def _first_fit(request: Request, settings: Mapping[str, Any]) -> Candidate | None:
    """The legal layout with the most stages per rank that fits; with balanced stages if needed."""
    config = Config(request.config.model, training=request.config.training).with_values(**settings)
    pp, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    shapes: list[dict[str, Any]] = [
        {"num_virtual_stages_per_pipeline_rank": virtual}
        for virtual in (4, 2)
        if pp > 1 and layers % (pp * virtual) == 0
    ]
    shapes.append({})
    if pp > 1:
        shapes.append({"pipeline_model_parallel_layout": balanced_layout(config, pp)})
    for shape in shapes:
        try:
            candidate = evaluate(request, request.checked(config.with_values(**shape)))
        except ConfigError:
            continue
        if candidate.prediction is not None:
            return candidate
    return None


def _widened(request: Request, settings: Mapping[str, Any], found: Candidate) -> Candidate:
    """The same layout with the largest micro-batch that fits and leaves the pipeline filled."""
    grid, batch = found.layout.grid, request.config.training.global_batch_size
    for size in _SEQUENCES:
        count, rest = divmod(batch, size * grid.dp)
        if size == 1 or rest or count < (_FILLING * grid.pp if grid.pp > 1 else 1):
            continue
        wider = _first_fit(request, {**settings, "micro_batch_size": size})
        if wider is not None:
            return wider
    return found


def _rule_steps(request: Request, found: Candidate) -> Iterator[str]:
    grid = found.layout.grid
    if grid.cp > 1:
        length = request.config.training.seq_length
        yield f"context parallelism {grid.cp}: {length:,} tokens, at most {LONG:,} on a rank"
    half = ", and at most 4 since the network is limited" if _is_limited(request) else ""
    yield f"tensor parallelism {grid.tp}: the smallest size inside a node that fits{half}"
    if grid.pp > 1:
        yield f"pipeline parallelism {grid.pp}: across nodes, since one node is not enough"
    if grid.ep > 1:
        yield (
            f"expert parallelism {grid.ep}: one node, or the smallest size that fits; no expert "
            "tensor parallelism"
        )
    yield f"data parallelism {grid.dp} with ZeRO-1 for the rest"
    if found.layout.config.memory.recompute_granularity:
        yield "full recomputation: without it nothing fits"
    size = found.layout.config.training.micro_batch_size
    filled = f" with {_FILLING} microbatches for each pipeline rank" if grid.pp > 1 else ""
    yield f"micro-batch {size}: the largest that fits{filled}"
