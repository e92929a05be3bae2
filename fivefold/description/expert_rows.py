"""Number of rows that a layer dispatches to experts, expected or padded."""

from dataclasses import dataclass
from math import comb

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import TokenDispatcher


@dataclass(frozen=True)
class LayerRows:
    """Rows of one layer on one rank, in one direction.

    Attributes:
        sent: number of rows sent to experts of other ranks.
        got: number of rows received from other ranks.
        stayed: number of rows whose experts are on their token's rank.
        computed: number of choices that reach this rank's experts, before rows of other ranks that
            split the same experts are added.
        joined: number of choices that these other ranks add.
        by_expert: rows that each of this rank's experts multiplies; empty: not known.
    """

    sent: float
    got: float
    stayed: float
    computed: float
    joined: float
    by_expert: tuple[float, ...] = ()

    @property
    def reached(self) -> float:
        """Rows that this rank's experts multiply."""
        return self.computed + self.joined

    def times(self, factor: float) -> "LayerRows":
        """Rows of `factor` times as many tokens."""
        return LayerRows(
            factor * self.sent,
            factor * self.got,
            factor * self.stayed,
            factor * self.computed,
            factor * self.joined,
            tuple(factor * rows for rows in self.by_expert),
        )


def expected_rows(
    dispatcher: TokenDispatcher, model: ModelConfig, *, ep: int, etp: int
) -> LayerRows:
    """Expected rows for one token per rank if all experts are chosen equally often.

    Args:
        dispatcher: token dispatcher.
        model: model with experts.
        ep: number of ranks that hold the experts, equally many each.
        etp: number of ranks that split each expert.
    """
    moved, topk = rows_sent(dispatcher, model, ep), model.moe_router_topk
    stayed = topk / ep if dispatcher == "alltoall" else _reached(model, ep)
    return LayerRows(moved, moved, stayed, topk, (etp - 1) * topk)


def padded_rows(
    dispatcher: TokenDispatcher,
    settings: ExpertsConfig,
    model: ModelConfig,
    *,
    ep: int,
    etp: int,
    tokens: int,
) -> LayerRows | None:
    """Rows of one forward of `tokens` tokens per rank if they are padded to a capacity.

    The capacity is that of every expert or of every expert-parallel rank. None: not padded.
    """
    room = settings.rank_capacity(tokens, model, ep)
    if room is not None:
        each = min(room, tokens) if dispatcher == "flex" else room
        moved, computed = (ep - 1) * each, ep * room
        return LayerRows(moved, moved, each, computed, (etp - 1) * computed)
    capacity = settings.capacity(tokens, model)
    if capacity is None or not settings.moe_pad_expert_input_to_capacity:
        return None
    for_each = capacity * (model.num_experts or 1) // ep
    moved, computed = (ep - 1) * for_each, ep * for_each
    return LayerRows(moved, moved, for_each, computed, (etp - 1) * computed)


def rows_sent(dispatcher: TokenDispatcher, model: ModelConfig, ranks: int) -> float:
    """Expected number of rows that a token sends to other ranks' experts, in one direction.

    With evenly used experts: one row per chosen expert (alltoall), one per rank with a chosen
    expert (flex, which sends a token at most once to a rank), or one to every rank (allgather).

    Args:
        dispatcher: token dispatcher.
        model: model with experts.
        ranks: number of ranks that hold the experts, equally many each.
    """
    elsewhere = 1 - 1 / ranks
    if dispatcher == "allgather":
        return ranks - 1
    if dispatcher == "alltoall":
        return model.moe_router_topk * elsewhere
    return ranks * _reached(model, ranks) * elsewhere


def _reached(model: ModelConfig, ranks: int) -> float:
    """The probability that a rank holds one of the experts of a token.

    A router with groups first chooses groups, then experts of these.
    """
    experts, topk = model.num_experts or 1, model.moe_router_topk
    groups, chosen = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
    each, own = experts // groups, experts // ranks
    pool = chosen * each

    def hit(held: int) -> float:
        """Probability that a token's experts include one of `held` experts of its groups."""
        return 1 - comb(pool - held, topk) / comb(pool, topk)

    if own < each:
        return chosen / groups * hit(own)
    spans = own // each  # number of whole groups on the rank
    chances = (
        comb(spans, met) * comb(groups - spans, chosen - met) * hit(met * each)
        for met in range(1, min(spans, chosen) + 1)
    )
    return sum(chances) / comb(groups, chosen)
