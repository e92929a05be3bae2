"""Rows dispatched to experts in a step, from the measured choices of all ranks.

Shapes: T tokens of a rank, K experts per token, P expert-parallel ranks, E experts of the layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import add

from fivefold.description.expert_rows import LayerRows
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES


@dataclass(frozen=True)
class Choices:
    """The choices of a rank's tokens in one layer, by the expert-parallel rank of the experts.

    Attributes:
        rows: number of choices without dropped ones, [P].
        tokens: number of tokens with at least one choice there, [P].
        experts: number of these choices by expert, [E]; empty in records that do not know.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    experts: tuple[int, ...] = ()

    def plus(self, other: "Choices") -> "Choices":
        """These and those of another forward of the layer."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Choices(*(tuple(map(add, *pair)) for pair in pairs))

    def of(self, place: int) -> tuple[int, ...]:
        """The choices of each expert of one of these ranks."""
        here = len(self.experts) // len(self.rows)
        return self.experts[place * here : (place + 1) * here]


LayerChoices = Mapping[int, Choices]
"""Layer -> choices of a rank's tokens."""


@dataclass(frozen=True)
class StepChoices:
    """Choices of a rank's tokens in one step, by layer.

    Attributes:
        every: choices of all microbatches.
        again: choices of the microbatches whose whole stage is recomputed.
        first: choices of each stage's first forward that kept activations for the backward.
    """

    every: LayerChoices = field(default_factory=dict)
    again: LayerChoices = field(default_factory=dict)
    first: LayerChoices = field(default_factory=dict)


@dataclass(frozen=True)
class StepRows:
    """Rows of one rank in one step, by layer.

    Attributes:
        every: rows of all microbatches.
        again: rows of the microbatches whose whole stage is recomputed.
        first: rows of each stage's first forward that kept activations for the backward.
    """

    every: Mapping[int, LayerRows]
    again: Mapping[int, LayerRows]
    first: Mapping[int, LayerRows]


def rows_of_choices(layout: Layout, rank: int, every: Sequence[StepChoices]) -> StepRows:
    """Rows of one rank, from the choices of all ranks.

    Args:
        layout: layout of the run.
        rank: rank whose rows are wanted.
        every: choices of all ranks, in rank order.
    """
    return StepRows(
        _layer_rows(layout, rank, [choices.every for choices in every]),
        _layer_rows(layout, rank, [choices.again for choices in every]),
        _layer_rows(layout, rank, [choices.first for choices in every]),
    )


def _layer_rows(layout: Layout, rank: int, every: Sequence[LayerChoices]) -> dict[int, LayerRows]:
    grid = layout.grid
    once = layout.config.parallel.moe_token_dispatcher_type == "flex"
    peers = grid.group_of(rank, ("ep",), EXPERT_AXES)
    place = peers.index(rank)
    parts = [other for other in grid.group_of(rank, ("etp",), EXPERT_AXES) if other != rank]
    senders = [peer for part in parts for peer in grid.group_of(part, ("ep",), EXPERT_AXES)]
    found = {}
    for layer in every[rank]:
        chosen = {peer: every[peer][layer] for peer in (*peers, *senders)}
        moved = {p: (of.tokens if once else of.rows) for p, of in chosen.items()}
        found[layer] = LayerRows(
            sent=sum(moved[rank]) - moved[rank][place],
            got=sum(moved[peer][place] for peer in peers if peer != rank),
            stayed=moved[rank][place],
            computed=sum(chosen[peer].rows[place] for peer in peers),
            joined=sum(chosen[peer].rows[place] for peer in senders),
            by_expert=tuple(map(sum, zip(*(of.of(place) for of in chosen.values()), strict=True))),
        )
    return found
