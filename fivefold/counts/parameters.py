"""The record of each parameter on a rank, which all other modules read; torch-free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from fivefold.config.model import ModelConfig
from fivefold.counts.shards import num_expert_shards, num_shards
from fivefold.description.shape import (
    EMBEDDING,
    StageParts,
    canonical_name,
    embedding_names,
    is_layer_matrix,
    stage_weights,
)
from fivefold.description.weights import Weight
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES
from fivefold.model.eight_bit.rules import ScaledLayer, delayed_linears, in_eight_bits


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter on one rank.

    Attributes:
        name: name of the parameter in the whole model.
        stored: name under which it is initialised and stored; a tied copy has the original's name.
        stage: index in the program of the stage that holds it.
        shape: shape of this rank's part before data-parallel sharding.
        experts: whether it belongs to experts, which have their own mesh.
        split_dim: dim that tensor-parallel ranks split (for experts, expert-tensor-parallel ranks);
            None: each rank holds the whole parameter.
        trained: whether it is trained; if not, it has no gradient and no optimizer state.
        sums: groups over which its gradient is summed, in order: first the ranks that see different
            tokens ("data", for experts "edp"), then "tp" if its ranks each compute a part, the
            other copy of the model ("mirror"), and the other copies of the embedding ("tied"),
            which may be on this rank. Of what is not trained only the first.
        loaded: whether a checkpoint is loaded into it, rather than into another copy on this rank.
        written: whether a checkpoint stores it as `stored`; False for copies.
        counted: whether this rank counts its elements in the global gradient norm; for every
            element exactly one rank does.
        narrow: whether it is gathered in the 8 bits in which it is multiplied.
        orthogonal: whether Muon updates it.
    """

    name: str
    stored: str
    stage: int
    shape: tuple[int, ...]
    experts: bool
    split_dim: int | None
    trained: bool
    sums: tuple[str, ...]
    loaded: bool
    written: bool
    counted: bool
    narrow: bool
    orthogonal: bool


def parameter_records(layout: Layout, rank: int) -> tuple[ParameterRecord, ...]:
    """The parameter records of a rank, stage by stage."""
    model, grid = layout.config.model, layout.grid
    stages = layout.stages_of(grid.coordinates(rank)["pp"])
    weights = {stage: stage_weights(model, spec) for stage, spec in stages.items()}
    here = [name for named in weights.values() for name in named]
    first = {canonical_name(model, name): name for name in reversed(here)}
    first |= {name: name for name in here if name == canonical_name(model, name)}
    shared, muon = _shares_embedding(layout), layout.config.optimizer.optimizer == "muon"
    places = {kind: _MeshPlace.of(layout, rank, expert=kind) for kind in (False, True)}
    records = []
    for stage, named in weights.items():
        for name, weight in named.items():
            stored, place = canonical_name(model, name), places[weight.of_experts]
            dim = weight.placed(grid.etp if weight.of_experts else grid.tp)
            tied = shared and stored == EMBEDDING
            original = name == stored and stage < len(layout.split.stages)
            records.append(
                ParameterRecord(
                    name=name,
                    stored=stored,
                    stage=stage,
                    shape=weight.local(grid.tp, grid.ep, grid.etp),
                    experts=weight.of_experts,
                    split_dim=dim,
                    trained=weight.trained,
                    sums=(place.data, *_further_sums(layout, weight, tied)),
                    loaded=first[stored] == name,
                    written=original,
                    counted=weight.trained
                    and original
                    and place.first_replica
                    and (dim is not None or place.tp == 0),
                    narrow=layout.config.training.fp8_param_gather and in_eight_bits(name, weight),
                    orthogonal=muon and weight.trained and is_layer_matrix(name, weight),
                )
            )
    return tuple(records)


def delayed_layers(
    layout: Layout, rank: int, records: Iterable[ParameterRecord]
) -> tuple[ScaledLayer, ...]:
    """The linear layers of a rank whose 8-bit operands have delayed scales.

    Args:
        layout: layout of the run.
        rank: number of the rank.
        records: its parameters.
    """
    every = delayed_linears(layout.config)
    ep = layout.grid.coordinates(rank, EXPERT_AXES)["ep"]
    found = []
    for record in records:
        name, _, what = record.name.rpartition(".")
        if name in every and what == "weight":
            held = record.shape[0] if record.experts else 1
            first = ep * held if record.experts else 0
            found.append(ScaledLayer(name, record.stage, record.written, every[name], first, held))
    return tuple(found)


def tied_ranks(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Sets of (several) pipeline ranks that sum the gradients of their copies of the embedding.

    With two copies of the model, a rank and its mirror hold the same parameters; one of them is in
    the first set, the other in the second.
    """
    if not layout.config.model.trains_all:  # the embedding is frozen
        return ()
    last = layout.grid.pp - 1
    holding = _stages_with_embedding(layout.config.model, layout.split.stages)
    ranks = {layout.split.placement[stage] for stage in holding}
    if layout.num_copies == 1:
        sets = [tuple(sorted(ranks))]
    else:
        lower = sorted({min(rank, last - rank) for rank in ranks})
        sets = [tuple(lower), tuple(last - rank for rank in reversed(lower))]
    return tuple(each for each in sets if len(each) > 1)


@lru_cache(maxsize=64)
def _stages_with_embedding(model: ModelConfig, stages: tuple[StageParts, ...]) -> tuple[int, ...]:
    """The stages that hold the token embedding or a copy of it; each of thousands of ranks asks."""
    names = set(embedding_names(model))
    return tuple(n for n, spec in enumerate(stages) if names & stage_weights(model, spec).keys())


def _shares_embedding(layout: Layout) -> bool:
    """Whether the embedding has copies whose gradients must be summed."""
    return len(_stages_with_embedding(layout.config.model, layout.split.stages)) > 1


@dataclass(frozen=True)
class _MeshPlace:
    """A rank's place among those that hold parameters of one kind.

    Attributes:
        data: name of the group of ranks that see different tokens.
        first_replica: whether it is in the first replica within that group.
        tp: index among the ranks that split the parameters.
    """

    data: str
    first_replica: bool
    tp: int

    @classmethod
    def of(cls, layout: Layout, rank: int, *, expert: bool) -> "_MeshPlace":
        """The place for parameters of experts, or for all others."""
        grid = layout.grid
        if expert:
            at = grid.coordinates(rank, EXPERT_AXES)
            return cls("edp", at["edp"] < num_expert_shards(layout), at["etp"])
        at = grid.coordinates(rank)
        index = grid.dp_rank(rank) * grid.cp + at["cp"]
        return cls("data", index < num_shards(layout), at["tp"])


def _further_sums(layout: Layout, weight: Weight, tied: bool) -> Iterator[str]:
    """Names of the groups that follow the data group in `sums`; `tied`: whether the parameter has
    copies."""
    if not weight.trained:
        return
    tp, sequence = layout.grid.tp, layout.config.parallel.sequence_parallel
    if tp > 1 and weight.is_partial(tp, sequence_parallel=sequence):
        yield "tp"
    if layout.num_copies > 1:
        yield "mirror"
    if tied:
        yield "tied"
