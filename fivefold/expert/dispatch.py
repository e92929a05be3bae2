"""The ways of tokens to experts on other ranks: alltoall, allgather and flex.

Shapes: T tokens of this rank, K experts of a token, E experts, e = E / P of them on each of the P
ranks of the expert-parallel group, H features. Where ranks also split every expert (ETP), these
gather each other's rows behind the way there, and sum their results before the way back.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.expert.transfer import Flight, join, share
from fivefold.mesh.collectives import all_gather, all_to_all, group_size
from fivefold.model.experts import Beside, RunExperts, by_expert, by_expert_padded
from fivefold.model.permutation import PlacedRows, Rows
from fivefold.model.routing import ExpertChoice


@dataclass(frozen=True)
class AllToAllDispatch:
    """A row for every expert that a token chose, sent to the rank of the expert.

    Attributes:
        ep: group of expert parallelism; None for one rank.
        etp: group that splits every expert; None for one rank.
    """

    ep: dist.ProcessGroup | None
    etp: dist.ProcessGroup | None

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: RunExperts,
        beside: tuple[Beside, Beside] | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]."""
        rows: Rows | PlacedRows
        if choice.padded_to is None:
            rows, rows_E = by_expert(choice)
            there = _Way.of(rows_E, self.ep)
        else:
            rows, rows_E = by_expert_padded(choice, choice.padded_to)
            there = _Way.padded(rows_E, choice.padded_to, self.ep)
        first, second = beside or (None, None)
        weights = there.go(rows.take(choice.weights_TK))
        x = there.go(rows.spread(x_TH), first)
        y = _run_split(x, weights, there, run, self.etp)
        return rows.collect(there.back(y, second))


@dataclass(frozen=True)
class FlexDispatch:
    """A row for every rank that holds experts that a token chose, sent once, with their numbers
    and weights; that rank adds up what they give in at least fp32 (as DeepEP does).

    Attributes as of `AllToAllDispatch`.
    """

    ep: dist.ProcessGroup | None
    etp: dist.ProcessGroup | None

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: RunExperts,
        beside: tuple[Beside, Beside] | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]."""
        ranks = group_size(self.ep)
        rows, rows_P, experts_RK, weights_RK = _by_rank(choice, ranks)
        there = _Way.of(rows_P, self.ep)
        first, second = beside or (None, None)
        # Numbers of experts on the rank that gets them; its number of experts: none.
        experts_RK, weights_RK = there.go(experts_RK), there.go(weights_RK)
        x = there.go(rows.spread(x_TH), first)
        here = choice.num_experts // ranks
        got = ExpertChoice(experts_RK, weights_RK, experts_RK < here, here)
        copies, rows_e = by_expert(got)
        here_only = _Way(None, [], [], rows_e[None])
        y = _run_split(copies.spread(x), copies.take(weights_RK), here_only, run, self.etp)
        wide = torch.promote_types(y.dtype, torch.float32)
        y = copies.collect(y.to(wide)).to(y.dtype)
        return rows.collect(there.back(y, second))


@dataclass(frozen=True)
class GatherDispatch:
    """Every token to every rank, which sums what its own experts give; nothing of it is uneven.

    Attributes:
        group: the ranks that hold the experts between them, parts of experts included.
        ep_index: place of this rank among those that hold other experts.
        ep_size: number of these.
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
class _Way:
    """A way to other ranks and back, of rows sorted by rank.

    Attributes:
        group: group of the ranks; None for one.
        sent: rows for each rank.
        got: rows from each rank.
        counts_Pe: the rows from each rank, by experts (or as one number).
        even: whether every rank gets equally many rows.
    """

    group: dist.ProcessGroup | None
    sent: list[int]
    got: list[int]
    counts_Pe: Tensor
    even: bool = False

    @classmethod
    def padded(cls, rows_E: Tensor, each: int, group: dist.ProcessGroup | None) -> "_Way":
        """The way of `each` rows for every expert, of which nobody needs to tell anybody."""
        ranks = group_size(group)
        sizes = [each * len(rows_E) // ranks] * ranks
        return cls(group, sizes, sizes, rows_E.view(ranks, -1), even=True)

    @classmethod
    def of(cls, rows_E: Tensor, group: dist.ProcessGroup | None) -> "_Way":
        """The way of rows of which each of E equal parts of the experts, or of the ranks, has a
        number: the ranks tell each other, and the host waits for it."""
        sent_Pe = rows_E.view(group_size(group), -1)
        if group is None:
            whole = [int(rows_E.sum())]
            return cls(None, whole, whole, sent_Pe)
        got_Pe = torch.empty_like(sent_Pe)
        all_to_all(list(sent_Pe.unbind()), list(got_Pe.unbind()), group)
        both = torch.stack([sent_Pe.sum(1), got_Pe.sum(1)])
        sent, got = both.tolist()
        return cls(group, sent, got, got_Pe)

    def go(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """Rows of this rank's tokens -> rows that reach this rank."""
        return self._moved(x, self.sent, self.got, beside)

    def back(self, x: Tensor, beside: Beside | None = None) -> Tensor:
        """The inverse."""
        return self._moved(x, self.got, self.sent, beside)

    def _moved(self, x: Tensor, sent: list[int], got: list[int], beside: Beside | None) -> Tensor:
        flight = None if self.group is None else Flight(sent, got, self.group)
        x = x if flight is None else flight.start(x)
        if beside is not None:
            beside()
        return x if flight is None else flight.land(x)


def _run_split(
    x: Tensor, weights: Tensor, there: _Way, run: RunExperts, etp: dist.ProcessGroup | None
) -> Tensor:
    """Run this rank's experts on rows that came from several ranks, each part sorted by expert.

    Args:
        x: rows.
        weights: weights of their results.
        there: the way on which they came.
        run: the experts, on rows sorted by expert.
        etp: the ranks that hold other parts of the same experts, and got other rows.
    """
    counts_Pe, sizes = there.counts_Pe, [len(x)]
    if etp is not None and there.even:
        sizes *= etp.size()
        counts_Pe = counts_Pe.repeat(etp.size(), 1)
    elif etp is not None:
        every = all_gather(counts_Pe[None].contiguous(), etp)
        sizes, counts_Pe = every.sum((1, 2)).tolist(), every.flatten(0, 1)
    if etp is not None:
        x, weights = join(x, sizes, etp), join(weights, sizes, etp)
    if len(counts_Pe) == 1:
        return run(x, weights, counts_Pe[0])
    parts, experts = counts_Pe.shape
    numbers = torch.arange(experts, device=x.device).repeat(parts)
    of_rows = numbers.repeat_interleave(counts_Pe.flatten(), output_size=len(x))
    rows = Rows(of_rows.argsort(stable=True), len(x), 1)
    y = rows.collect(run(rows.spread(x), rows.spread(weights), counts_Pe.sum(0)))
    return y if etp is None else share(y, sizes, etp)


def _by_rank(choice: ExpertChoice, ranks: int) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """A row for each rank that a token goes to, sorted by rank.

    Returns:
        The rows; how many go to each rank, [P]; numbers on that rank of the experts of each row,
        [R, K], e where an expert is on another rank; their weights, [R, K].
    """
    tokens, topk = choice.experts_TK.shape
    here = choice.num_experts // ranks
    ranks_TK = choice.experts_TK // here
    if choice.kept_TK is not None:
        ranks_TK = ranks_TK.masked_fill(~choice.kept_TK, ranks)
    numbers_P = torch.arange(ranks, device=ranks_TK.device)
    goes_TP = (ranks_TK[:, :, None] == numbers_P).any(1)
    slots = min(topk, ranks)
    # Sorted by rank, then by token: the slot of a row is its place among those of its token.
    rank_R, token_R = goes_TP.t().nonzero(as_tuple=True)
    slot_R = (goes_TP.cumsum(1) - 1)[token_R, rank_R]
    rows = Rows(token_R * slots + slot_R, tokens, slots)
    there_RK = ranks_TK[token_R] == rank_R[:, None]
    numbers_RK = (choice.experts_TK[token_R] % here).masked_fill(~there_RK, here)
    weights_RK = rows.spread(choice.weights_TK).masked_fill(~there_RK, 0.0)
    return rows, goes_TP.sum(0), numbers_RK, weights_RK
