"""Records the experts that this rank's tokens choose in a step, at the routers' outputs."""

from collections.abc import Iterable, Mapping
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
class RecordedChoice:
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
        self._seen: dict[tuple[int, int], RecordedChoice] = {}
        self._first: dict[int, RecordedChoice] = {}
        self._repeated: list[RecordedChoice] = []

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
        seen = [*self._seen.values(), *self._repeated]
        again = [one for one in seen if one.again]
        return StepChoices(self._of(seen), self._of(again), self._of([*self._first.values()]))

    def seen(self) -> tuple[RecordedChoice, ...]:
        """Every choice so far, in order."""
        return tuple(self._seen.values())

    def repeat(self, seen: Iterable[RecordedChoice]) -> None:
        """Count choices of another microbatch that chooses the same, and does not run."""
        self._repeated += seen

    def _of(self, seen: list[RecordedChoice]) -> dict[int, Choices]:
        found: dict[int, Choices] = {}
        for one in seen:
            new = self._counted(one)
            before = found.get(one.layer)
            found[one.layer] = new if before is None else before.plus(new)
        return found

    def _counted(self, seen: RecordedChoice) -> Choices:
        """A router's choices."""
        ranks_TK = seen.experts_TK // seen.here
        if seen.kept_TK is not None:
            ranks_TK = ranks_TK.masked_fill(~seen.kept_TK, self._ranks)
        # Dropped tokens are counted for one further rank.
        counts_TP = ranks_TK.new_zeros(len(ranks_TK), self._ranks + 1)
        counts_TP = counts_TP.scatter_add_(1, ranks_TK, torch.ones_like(ranks_TK))[:, :-1]
        kept = seen.experts_TK if seen.kept_TK is None else seen.experts_TK[seen.kept_TK]
        counts_E = torch.bincount(kept.flatten(), minlength=seen.here * self._ranks)
        rows, tokens = counts_TP.sum(0), (counts_TP > 0).sum(0)
        return Choices(*(tuple(counts.tolist()) for counts in (rows, tokens, counts_E)))

    def _chosen(self, router: Router, given: tuple[Tensor, Context], choice: ExpertChoice) -> None:
        layer = router.number(given[1])
        keeps = torch.is_grad_enabled()
        here = choice.num_experts // self._ranks
        seen = RecordedChoice(layer, choice.experts_TK, choice.kept_TK, here, again=not keeps)
        self._seen.setdefault((layer, id(choice.experts_TK)), seen)
        if keeps:
            self._first.setdefault(layer, seen)
