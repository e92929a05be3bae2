"""Lets routers of a run in bf16 choose the experts that one device in fp64 has chosen.

A router that is nearly undecided chooses another expert when one bit of its scores differs, and
then the gradients of both experts differ by far more than rounding. What routers choose is compared
in fp64.
"""

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from fivefold.model.context import Context
from fivefold.model.moe.routing import Router, plain_choice
from fivefold.model.transformer import Stage

Choices = dict[int, Tensor]
"""By layer, int64 rows of tokens, ascending: a token's run-wide id, its K experts and, where
capacity is limited, whether each of them has capacity for it."""


class ChoiceRecorder:
    """Writes down what the routers of a model choose from now on."""

    def __init__(self, model: Stage) -> None:
        self._rows: defaultdict[int, list[Tensor]] = defaultdict(list)
        for mixture in model.mixtures:
            mixture.router.choice = self._choose

    def taken(self) -> Choices:
        """All choices since the last call."""
        found = {layer: torch.cat(rows) for layer, rows in self._rows.items()}
        self._rows.clear()
        return {layer: rows[rows[:, 0].argsort()] for layer, rows in found.items()}

    def _choose(
        self, router: Router, logits_TE: Tensor, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        experts_TK, kept_TK = plain_choice(router, logits_TE, context)
        assert context.token_ids_T is not None
        row = [context.token_ids_T[:, None], experts_TK]
        if kept_TK is not None:
            row.append(kept_TK.long())
        self._rows[router.number(context)].append(torch.cat(row, 1))
        return experts_TK, kept_TK


def follow(model: Stage, choices: Choices, device: torch.device) -> None:
    """Let the routers of a stage choose what was chosen for the same tokens."""
    for mixture in model.mixtures:
        layers = model.model.layers_like(mixture.router.layer)
        mixture.router.choice = partial(_known, {n: choices[n].to(device) for n in layers})


def _known(
    choices: Choices, router: Router, logits_TE: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    assert context.token_ids_T is not None
    topk, rows = router.model.moe_router_topk, choices[router.number(context)]
    ids_N = rows[:, 0].contiguous()
    own = rows[torch.searchsorted(ids_N, context.token_ids_T.contiguous())][:, 1:]
    return own[:, :topk], own[:, topk:].bool() if own.shape[1] > topk else None
