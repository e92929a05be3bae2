"""Records the experts that this rank's tokens choose in a step, at the routers' outputs."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.counts.routed import Choices, StepChoices
from fivefold.mesh.collectives import group_size
from fivefold.mesh.groups import Groups
from fivefold.model.context import Context
from fivefold.model.moe.routing import ExpertChoice, Router
from fivefold.model.transformer import Stage


@dataclass
class _Seen:
    """A router's choice, without tensors that the run itself frees before the backward.

    Attributes:
        layer: index of the layer.
        experts_TK: experts of each token.
        kept_TK: whether the expert had capacity for the token; None: nothing dropped.
        here: number of experts per expert-parallel rank.
        again: whether the forward kept nothing for the backward, so that it is recomputed.
    """

    layer: int
    experts_TK: Tensor
    kept_TK: Tensor | None
    here: int
    again: bool


class ChosenExperts:
    """Records every router choice inside its block; a recomputed choice counts once.

    Args:
        stages: stages by index.
        groups: process groups of this rank.
    """

    def __init__(self, stages: Mapping[int, Stage], groups: Groups) -> None:
        self._stages = stages
        self._ranks = 1 if groups.experts is None else group_size(groups.experts.ep)
        self._exit = ExitStack()
        # Recomputation returns the same tensor. Keeping it prevents another one at its address.
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._first: dict[int, _Seen] = {}

    def __enter__(self) -> "ChosenExperts":
        for stage in self._stages.values():
            for mixture in stage.mixtures:
                router = mixture.router
                hook = router.register_forward_hook(self._chosen)
                self._exit.callback(hook.remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.close()

    @property
    def choices(self) -> StepChoices:
        """All choices of the step by layer."""
        seen = [*self._seen.values()]
        again = [one for one in seen if one.again]
        return StepChoices(self._of(seen), self._of(again), self._of([*self._first.values()]))

    def _of(self, seen: list[_Seen]) -> dict[int, Choices]:
        rows: dict[int, list[int]] = {}
        tokens: dict[int, list[int]] = {}
        for one in seen:
            for total, new in zip((rows, tokens), self._by_rank(one), strict=True):
                before = total.get(one.layer, [0] * self._ranks)
                total[one.layer] = [a + b for a, b in zip(before, new, strict=True)]
        return {layer: Choices(tuple(rows[layer]), tuple(tokens[layer])) for layer in rows}

    def _by_rank(self, seen: _Seen) -> tuple[list[int], list[int]]:
        """Number of choices, and of tokens with a choice, by expert-parallel rank."""
        ranks_TK = seen.experts_TK // seen.here
        if seen.kept_TK is not None:
            ranks_TK = ranks_TK.masked_fill(~seen.kept_TK, self._ranks)
        # Dropped tokens are counted for one further rank.
        counts_TP = ranks_TK.new_zeros(len(ranks_TK), self._ranks + 1)
        counts_TP = counts_TP.scatter_add_(1, ranks_TK, torch.ones_like(ranks_TK))[:, :-1]
        return counts_TP.sum(0).tolist(), (counts_TP > 0).sum(0).tolist()

    def _chosen(self, router: Router, given: tuple[Tensor, Context], choice: ExpertChoice) -> None:
        layer = router.number(given[1])
        keeps = torch.is_grad_enabled()
        here = choice.num_experts // self._ranks
        seen = _Seen(layer, choice.experts_TK, choice.kept_TK, here, again=not keeps)
        self._seen.setdefault((layer, id(choice.experts_TK)), seen)
        if keeps:
            self._first.setdefault(layer, seen)
