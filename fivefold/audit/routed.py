"""What the tokens of this rank choose in a step, seen where routers hand it on."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from fivefold.counts.routed import Choices
from fivefold.mesh.collectives import group_size
from fivefold.mesh.groups import Groups
from fivefold.model.routing import ExpertChoice
from fivefold.model.transformer import Stage


class ChosenExperts:
    """Keeps every choice of routers while it is entered; one that is repeated counts once.

    Args:
        stages: the modules by index.
        groups: groups of this rank.
    """

    def __init__(self, stages: Mapping[int, Stage], groups: Groups) -> None:
        self._stages = stages
        self._ranks = 1 if groups.experts is None else group_size(groups.experts.ep)
        self._exit = ExitStack()
        # A repetition finds the same tensor of experts, which is kept, so that no other is there.
        self._seen: dict[tuple[int, int], ExpertChoice] = {}

    def __enter__(self) -> "ChosenExperts":
        for stage in self._stages.values():
            for mixture in stage.mixtures:
                router = mixture.router
                hook = router.register_forward_hook(partial(self._chosen, router.layer))
                self._exit.callback(hook.remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._exit.close()

    @property
    def by_layer(self) -> dict[int, Choices]:
        """All choices together."""
        return self._of([*self._seen.items()])

    @property
    def first(self) -> dict[int, Choices]:
        """Those of each layer's first forward."""
        firsts = {key[0]: (key, choice) for key, choice in reversed(self._seen.items())}
        return self._of(list(firsts.values()))

    def _of(self, choices: list[tuple[tuple[int, int], ExpertChoice]]) -> dict[int, Choices]:
        rows: dict[int, list[int]] = {}
        tokens: dict[int, list[int]] = {}
        for (layer, _), choice in choices:
            for total, new in zip((rows, tokens), self._by_rank(choice), strict=True):
                before = total.get(layer, [0] * self._ranks)
                total[layer] = [a + b for a, b in zip(before, new, strict=True)]
        return {layer: Choices(tuple(rows[layer]), tuple(tokens[layer])) for layer in rows}

    def _by_rank(self, choice: ExpertChoice) -> tuple[list[int], list[int]]:
        """Choices, and tokens with a choice, by expert-parallel rank."""
        ranks_TK = choice.experts_TK // (choice.num_experts // self._ranks)
        if choice.kept_TK is not None:
            ranks_TK = ranks_TK.masked_fill(~choice.kept_TK, self._ranks)
        counts_TP = torch.stack([(ranks_TK == rank).sum(1) for rank in range(self._ranks)], 1)
        return counts_TP.sum(0).tolist(), (counts_TP > 0).sum(0).tolist()

    def _chosen(self, layer: int, module: nn.Module, args: Any, choice: ExpertChoice) -> None:
        self._seen.setdefault((layer, id(choice.experts_TK)), choice)
