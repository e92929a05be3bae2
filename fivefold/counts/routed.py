"""Rows that tokens make on their way to experts: as many as a run had, or as many as are expected.

Shapes in words: T tokens of a rank, K experts of a token, P expert-parallel ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fivefold.counts.messages import rows_sent
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES


@dataclass(frozen=True)
class Choices:
    """What the tokens of a rank chose in one layer, by the expert-parallel rank of the experts.

    Attributes:
        rows: choices, dropped ones apart: [P].
        tokens: tokens with a choice there: [P].
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class LayerRows:
    """Rows of one layer in a step, on one rank, in one direction.

    Attributes:
        sent: rows that leave for experts of other ranks.
        got: rows that come from other ranks.
        computed: choices that reach this rank's experts, before those of the other ranks of the
            same experts are joined.
        joined: choices that these others bring.
    """

    sent: float
    got: float
    computed: float
    joined: float


RankChoices = Mapping[int, Choices]
"""What a rank's tokens chose, by layer."""


def expected_rows(layout: Layout, tokens: float) -> LayerRows:
    """Of so many tokens, if all experts are chosen equally often."""
    model, grid = layout.config.model, layout.grid
    moved = tokens * rows_sent(layout.config.parallel.moe_token_dispatcher_type, model, grid.ep)
    computed = tokens * model.moe_router_topk
    return LayerRows(moved, moved, computed, (grid.etp - 1) * computed)


def padded_rows(layout: Layout, tokens: int, calls: int) -> LayerRows | None:
    """Of `calls` forwards of so many tokens, where every expert gets as many rows as it has room
    for; None where it gets what was chosen."""
    experts, model, grid = layout.config.experts, layout.config.model, layout.grid
    capacity = experts.capacity(tokens, model)
    if capacity is None or not experts.moe_pad_expert_input_to_capacity:
        return None
    for_each = calls * capacity * (model.num_experts or 1) // grid.ep
    moved = (grid.ep - 1) * for_each
    computed = grid.ep * for_each
    return LayerRows(moved, moved, computed, (grid.etp - 1) * computed)


def rows_of_choices(
    layout: Layout, rank: int, every: Sequence[RankChoices]
) -> dict[int, LayerRows]:
    """By layer, what the choices of all ranks mean for one of them.

    Args:
        layout: layout of the run.
        rank: rank in question.
        every: choices of all ranks, in order; none without experts.
    """
    if not every:
        return {}
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
            computed=sum(chosen[peer].rows[place] for peer in peers),
            joined=sum(chosen[peer].rows[place] for peer in senders),
        )
    return found
