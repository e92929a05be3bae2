"""Token dispatchers of expert parallelism: alltoall, allgather and flex.

Shapes: T tokens of this rank, K experts per token, E experts, e = E / P of them on each of the P
ranks of the expert-parallel group, H features. If ranks also split each expert (ETP), they gather
each other's rows after the dispatch, and sum their results before the combine.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.expert.transfer import AsyncAllToAll, join, share
from fivefold.mesh.collectives import all_gather, exchange_rows, group_size
from fivefold.model.moe.layer import Beside, RunExperts, by_expert, by_expert_padded, by_part_padded
from fivefold.model.moe.permutation import PlacedRows, Rows
from fivefold.model.moe.routing import ExpertChoice


@dataclass(frozen=True)
class _RowDispatch:
    """Base of dispatchers that send rows of tokens to other ranks.

    Attributes:
        ep: expert-parallel group; None: one rank.
        etp: group of ranks that split each expert; None: one rank.
        meanwhile: function called before waiting for rows, forward and backward; None: nothing.
    """

    ep: dist.ProcessGroup | None
    etp: dist.ProcessGroup | None
    meanwhile: Callable[[], None] | None


class AllToAllDispatch(_RowDispatch):
    """Sends one row per chosen expert to the expert's rank."""

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: RunExperts,
        beside: tuple[Beside, Beside] | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]."""
        rows: Rows | PlacedRows
        padded_size = choice.padded_ranks_to
        if padded_size is not None:
            rows, rows_E = by_part_padded(choice, group_size(self.ep), padded_size)
            there = _RowExchange.padded_by_rank(rows_E, padded_size, self.ep)
        elif choice.padded_to is None:
            rows, rows_E = by_expert(choice)
            there = _RowExchange.of(rows_E, self.ep)
        else:
            rows, rows_E = by_expert_padded(choice, choice.padded_to)
            there = _RowExchange.padded(rows_E, choice.padded_to, self.ep)
        there = replace(there, meanwhile=self.meanwhile)
        first, second = beside or (None, None)
        arrived = there.go(rows.take(choice.weights_TK), rows.spread(x_TH), beside=first)
        return rows.collect(there.back(_run_split(arrived, there, run, self.etp), second))


class FlexDispatch(_RowDispatch):
    """Sends one row per rank with chosen experts, with the experts' indices and weights.

    The receiving rank sums its experts' results in at least fp32 (as DeepEP does).
    """

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: RunExperts,
        beside: tuple[Beside, Beside] | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]."""
        ranks, padded_size = group_size(self.ep), choice.padded_ranks_to
        rows: Rows | PlacedRows
        if padded_size is None:
            rows, rows_P, experts_RK, weights_RK = _by_rank(choice, ranks)
            there = _RowExchange.of(rows_P, self.ep)
        else:
            each = min(padded_size, len(x_TH))
            rows, rows_P, experts_RK, weights_RK = _by_rank_padded(choice, ranks, each)
            there = _RowExchange.padded(rows_P, each, self.ep)
        there = replace(there, meanwhile=self.meanwhile)
        first, second = beside or (None, None)
        # Expert indices local to the receiving rank; its number of experts means none.
        experts_RK, weights_RK, x = there.go(
            experts_RK, weights_RK, rows.spread(x_TH), beside=first
        )
        here = choice.num_experts // ranks
        total = None if padded_size is None else ranks * padded_size
        got = ExpertChoice(experts_RK, weights_RK, experts_RK < here, here, padded_ranks_to=total)
        return rows.collect(there.back(run_chosen(x, got, run, self.etp), second))


@dataclass(frozen=True)
class GatherDispatch:
    """Sends every token to every rank, which sums its own experts' results; all sizes are equal.

    Attributes:
        group: ranks that together hold the experts, including parts of experts.
        ep_index: index of this rank among the expert-parallel ranks.
        ep_size: number of expert-parallel ranks.
    """

    group: dist.ProcessGroup
    ep_index: int
    ep_size: int

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: RunExperts,
        beside: tuple[Beside, Beside] | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]."""
        assert beside is None, "collectives of all tokens run by themselves"
        rows = [len(x_TH)] * self.group.size()
        here = choice.num_experts // self.ep_size
        experts = choice.experts_TK
        if choice.kept_TK is not None:
            experts = experts.masked_fill(~choice.kept_TK, choice.num_experts)
        local = all_gather(experts, self.group) - self.ep_index * here
        kept = (local >= 0) & (local < here)
        weights = join(choice.weights_TK, rows, self.group)
        got = ExpertChoice(local.masked_fill(~kept, 0), weights, kept, here)
        copies: Rows | PlacedRows
        if choice.padded_to is None:
            copies, rows_e = by_expert(got)
        else:
            copies, rows_e = by_expert_padded(got, choice.padded_to * len(rows))
        y = run(copies.spread(join(x_TH, rows, self.group)), copies.take(weights), rows_e)
        return share(copies.collect(y), rows, self.group)


@dataclass(frozen=True)
class _RowExchange:
    """An exchange of rows sorted by rank with other ranks, in both directions.

    Attributes:
        group: ranks that take part; None: one rank.
        sent: number of rows for each rank.
        got: number of rows from each rank.
        counts_Pe: number of rows from each rank by expert, or in total; without padding if
            `padded_size`.
        even: whether all ranks get equally many rows, including padding.
        padded_size: number of rows from each rank including padding, if `counts_Pe` is without it;
            None: `counts_Pe` counts all rows.
        meanwhile: function called before waiting for rows; None: nothing.
    """

    group: dist.ProcessGroup | None
    sent: list[int]
    got: list[int]
    counts_Pe: Tensor
    even: bool = False
    padded_size: int | None = None
    meanwhile: Callable[[], None] | None = None

    @classmethod
    def padded(cls, rows_E: Tensor, each: int, group: dist.ProcessGroup | None) -> "_RowExchange":
        """An exchange of `each` rows for every expert, without communicating numbers of rows."""
        ranks = group_size(group)
        sizes = [each * len(rows_E) // ranks] * ranks
        return cls(group, sizes, sizes, rows_E.view(ranks, -1), even=True)

    @classmethod
    def padded_by_rank(
        cls, rows_E: Tensor, padded_size: int, group: dist.ProcessGroup | None
    ) -> "_RowExchange":
        """An exchange of `padded_size` rows with every rank, padded with zeros at the end.

        The ranks exchange the numbers of rows without padding; the host does not wait for them.
        """
        sizes = [padded_size] * group_size(group)
        return cls(
            group,
            sizes,
            sizes,
            _exchange_counts(rows_E, group)[1],
            even=True,
            padded_size=padded_size,
        )

    @classmethod
    def of(cls, rows_E: Tensor, group: dist.ProcessGroup | None) -> "_RowExchange":
        """An exchange of `rows_E` rows for each of E equal parts of the experts, or of the ranks.

        The ranks exchange these numbers, and the host waits for them.
        """
        sent_Pe, got_Pe = _exchange_counts(rows_E, group)
        if group is None:
            whole = [int(rows_E.sum())]
            return cls(None, whole, whole, sent_Pe)
        both = torch.stack([sent_Pe.sum(1), got_Pe.sum(1)])
        sent, got = both.tolist()
        return cls(group, sent, got, got_Pe)

    def go(self, *parts: Tensor, beside: Beside | None) -> list[Tensor]:
        """Tensors of rows of this rank's tokens -> those of rows dispatched to this rank.

        All transfers start before the first wait.
        """
        return self._moved(parts, self.sent, self.got, beside)

    def back(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """Rows on this rank -> rows of this rank's tokens."""
        return self._moved((x,), self.got, self.sent, beside)[0]

    def _moved(
        self, parts: Sequence[Tensor], sent: list[int], got: list[int], beside: Beside | None
    ) -> list[Tensor]:
        beside = beside or _nothing
        if self.group is None:
            beside()
            return list(parts)
        # Wait for the last tensor first; in the backward, autograd's order does the same.
        waits = [None] * (len(parts) - 1) + [self.meanwhile]
        flights = [AsyncAllToAll(sent, got, self.group, meanwhile) for meanwhile in waits]
        pairs = [(flight, flight.start(x)) for flight, x in zip(flights, parts, strict=True)]
        with ExitStack() as stack:
            for flight in flights:
                stack.enter_context(flight.under_way())
            beside()
        return [flight.land(x) for flight, x in reversed(pairs)][::-1]


def _nothing() -> None:
    """Does nothing during the transfers."""


def _run_split(
    arrived: list[Tensor], there: _RowExchange, run: RunExperts, etp: dist.ProcessGroup | None
) -> Tensor:
    """Run this rank's experts on rows from several ranks, each rank's rows sorted by expert.

    Args:
        arrived: weights of the rows' results, and the rows. They are taken out of the list, so
            that rows are free when they have been sorted, while experts run.
        there: exchange by which they arrived.
        run: the experts, for rows sorted by expert.
        etp: ranks that hold other parts of the same experts, and received other rows.
    """
    x, weights = arrived.pop(), arrived.pop()
    counts_Pe, sizes, padded_size = there.counts_Pe, [len(x)], there.padded_size
    if etp is not None:
        known = there.even and padded_size is None
        every = counts_Pe[None] if known else all_gather(counts_Pe[None].contiguous(), etp)
        counts_Pe = every.flatten(0, 1).repeat(etp.size() if known else 1, 1)
        sizes = sizes * etp.size() if there.even else every.sum((1, 2)).tolist()
        x, weights = join(x, sizes, etp), join(weights, sizes, etp)
    rows_e = counts_Pe.sum(0)
    if padded_size is not None:  # the last expert also runs the padding
        zeros_P1 = padded_size - counts_Pe.sum(1, keepdim=True)
        counts_Pe = torch.cat([counts_Pe, zeros_P1], 1)
        rows_e = torch.cat([rows_e[:-1], rows_e[-1:] + zeros_P1.sum(0)])
    if len(counts_Pe) == 1:
        return run(x, weights, rows_e)
    parts, experts = counts_Pe.shape
    numbers = torch.arange(experts, device=x.device).repeat(parts)
    of_rows = numbers.repeat_interleave(counts_Pe.flatten(), output_size=len(x))
    rows = Rows(of_rows.argsort(stable=True), len(x), 1)
    x, weights = rows.spread(x), rows.spread(weights)  # rows as they were joined are free
    y = rows.collect(run(x, weights, rows_e))
    return y if etp is None else share(y, sizes, etp)


def _exchange_counts(rows_E: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """[P, e] numbers of rows sent to each rank's experts, and received from each rank for those
    here."""
    sent_Pe = rows_E.view(group_size(group), -1)
    if group is None:
        return sent_Pe, sent_Pe
    return sent_Pe, exchange_rows(sent_Pe, group)


def run_chosen(
    x: Tensor,
    got: ExpertChoice,
    run: RunExperts,
    etp: dist.ProcessGroup | None,
    kept: int | None = None,
) -> Tensor:
    """Run every row through its experts on this rank, and sum their results in at least fp32.

    Args:
        x: [R, H] rows.
        got: choices of the rows among this rank's experts.
        run: the experts, for rows sorted by expert.
        etp: ranks that hold other parts of the same experts, and received other rows.
        kept: number of choices that `got` keeps; None: the host waits for the number.
    """
    copies: Rows | PlacedRows
    padded_size = got.padded_ranks_to
    if padded_size is None:
        copies, rows_e = by_expert(got, kept)
    else:
        copies, rows_e = by_part_padded(got, 1, padded_size)
    here_only = _RowExchange(
        None, [], [], rows_e[None], even=padded_size is not None, padded_size=padded_size
    )
    y = _run_split([copies.take(got.weights_TK), copies.spread(x)], here_only, run, etp)
    wide = torch.promote_types(y.dtype, torch.float32)
    return copies.collect(y.to(wide)).to(y.dtype)


def _by_rank(choice: ExpertChoice, ranks: int) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """One row for each rank that a token is sent to, sorted by rank.

    Returns:
        The rows; number of rows for each rank, [P]; index on the receiving rank of each row's
        experts, [R, K], e for an expert on another rank; their weights, [R, K].
    """
    tokens, topk = choice.experts_TK.shape
    here = choice.num_experts // ranks
    ranks_TK = choice.experts_TK // here
    if choice.kept_TK is not None:
        ranks_TK = ranks_TK.masked_fill(~choice.kept_TK, ranks)
    numbers_P = torch.arange(ranks, device=ranks_TK.device)
    goes_TP = (ranks_TK[:, :, None] == numbers_P).any(1)
    slots = min(topk, ranks)
    # Sorted by rank, then token; a row's slot is its index among its token's rows.
    rank_R, token_R = goes_TP.t().nonzero(as_tuple=True)
    slot_R = (goes_TP.cumsum(1) - 1)[token_R, rank_R]
    rows = Rows(token_R * slots + slot_R, tokens, slots)
    there_RK = ranks_TK[token_R] == rank_R[:, None]
    numbers_RK = (choice.experts_TK[token_R] % here).masked_fill(~there_RK, here)
    weights_RK = rows.spread(choice.weights_TK).masked_fill(~there_RK, 0.0)
    return rows, goes_TP.sum(0), numbers_RK, weights_RK


def _by_rank_padded(
    choice: ExpertChoice, ranks: int, each: int
) -> tuple[PlacedRows, Tensor, Tensor, Tensor]:
    """As `_by_rank`, padded to `each` rows per rank; does not synchronise with the device.

    A token has one slot per expert. If several are on one rank, the row is in the first of them.
    """
    here, experts_TK = choice.num_experts // ranks, choice.experts_TK
    if choice.kept_TK is not None:
        experts_TK = experts_TK.masked_fill(~choice.kept_TK, choice.num_experts)
    ranks_TK = experts_TK // here
    goes_TP = ranks_TK.new_zeros(len(ranks_TK), ranks + 1).scatter_(1, ranks_TK, 1)
    place_TK = (goes_TP.cumsum(0) - 1).gather(1, ranks_TK)
    again_TK = (ranks_TK[:, :, None] == ranks_TK[:, None, :]).tril(-1).any(2)
    none_TK = again_TK | (ranks_TK == ranks)
    places_TK = (ranks_TK * each + place_TK).masked_fill(none_TK, ranks * each)
    rows = PlacedRows(places_TK, ranks * each)
    first_R1 = torch.arange(ranks * each, device=ranks_TK.device)[:, None] // each * here
    numbers_RK = rows.spread_values(experts_TK + 1) - 1 - first_R1  # negative: padding
    there_RK = (numbers_RK >= 0) & (numbers_RK < here)
    weights_RK = rows.spread(choice.weights_TK).masked_fill(~there_RK, 0.0)
    return rows, goes_TP[:, :ranks].sum(0), numbers_RK.masked_fill(~there_RK, here), weights_RK
