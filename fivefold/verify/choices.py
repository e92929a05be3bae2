"""Makes routers and indexers of a 16-bit run repeat the choices of one device in fp64.

If two scores are nearly equal, one bit decides which expert, or which token, is chosen, and the
gradients then differ by far more than rounding. The choices themselves are compared in fp64.
"""

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from fivefold.model.attention.blocks import num_tokens
from fivefold.model.attention.chosen import places
from fivefold.model.attention.indexer import Indexer
from fivefold.model.attention.sparse import SomeQueries, best
from fivefold.model.context import Context
from fivefold.model.moe.routing import Router, plain_choice
from fivefold.model.transformer import Stage

Choices = dict[str, Tensor]
"""By layer and chooser, int64 rows of tokens in ascending order: a token's run-wide id, then for a
router its K experts and, with limited capacity, whether each has capacity for it; for an indexer
the distance back to each chosen token, or -1 for none."""


class ChoiceRecorder:
    """Records the choices of a model's routers and indexers from now on."""

    def __init__(self, model: Stage) -> None:
        self._rows: defaultdict[str, list[Tensor]] = defaultdict(list)
        for mixture in model.mixtures:
            mixture.router.choice = self._choose
        for indexer in _indexers(model):
            indexer.choice = self._choose_tokens

    def taken(self) -> Choices:
        """All choices since the last call."""
        found = {of: torch.cat(rows) for of, rows in self._rows.items()}
        self._rows.clear()
        return {of: _ascending(rows) for of, rows in found.items()}

    def _choose(
        self, router: Router, logits_TE: Tensor, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        experts_TK, kept_TK = plain_choice(router, logits_TE, context)
        assert context.token_ids_T is not None
        row = [context.token_ids_T[:, None], experts_TK]
        if kept_TK is not None:
            row.append(kept_TK.long())
        self._rows[_router(router.number(context))].append(torch.cat(row, 1))
        return experts_TK, kept_TK

    def _choose_tokens(
        self, indexer: Indexer, context: Context, scores: Tensor, queries: SomeQueries
    ) -> Tensor:
        topk = indexer.model.indexer.topk
        chosen = best(scores, topk) & (scores > float("-inf"))
        at_BqK, there_BqK = places(chosen, topk)
        before = torch.arange(*queries.at)[:, None] - queries.of[0] - at_BqK
        rows = torch.where(there_BqK, before, -1), _ids(context, queries, len(scores))[..., None]
        of = _indexer(indexer.number(context))
        self._rows[of].append(torch.cat(rows[::-1], -1).flatten(0, 1))
        return chosen


def follow(model: Stage, choices: Choices, device: torch.device) -> None:
    """Let the routers and indexers of a stage choose what was chosen for the same tokens."""
    for mixture in model.mixtures:
        layers = model.model.layers_like(mixture.router.layer)
        known = {n: choices[_router(n)].to(device) for n in layers}
        mixture.router.choice = partial(_known, known)
    for indexer in _indexers(model):
        layers = model.model.layers_like(indexer.layer)
        known = {n: choices[_indexer(n)].to(device) for n in layers}
        indexer.choice = partial(_known_tokens, known)


def _known(
    choices: dict[int, Tensor], router: Router, logits_TE: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    assert context.token_ids_T is not None
    topk = router.model.moe_router_topk
    own = _of(choices[router.number(context)], context.token_ids_T)
    return own[:, :topk], own[:, topk:].bool() if own.shape[1] > topk else None


def _known_tokens(
    choices: dict[int, Tensor],
    indexer: Indexer,
    context: Context,
    scores: Tensor,
    queries: SomeQueries,
) -> Tensor:
    rows, count, length = scores.shape
    ids_Bq = _ids(context, queries, rows).to(scores.device)
    before = _of(choices[indexer.number(context)], ids_Bq.flatten()).view(rows, count, -1)
    at = torch.arange(*queries.at, device=scores.device)[:, None] - queries.of[0]
    keys = torch.where(before < 0, length, at - before)
    chosen = torch.zeros(rows, count, length + 1, dtype=torch.bool, device=scores.device)
    return chosen.scatter_(-1, keys, True)[..., :length]


def _of(rows: Tensor, ids_N: Tensor) -> Tensor:
    """The recorded choices for tokens with these ids."""
    return rows[torch.searchsorted(rows[:, 0].contiguous(), ids_N.contiguous())][:, 1:]


def _ascending(rows: Tensor) -> Tensor:
    """Each token once, in ascending order; a backward repeats choices."""
    rows = rows[rows[:, 0].argsort()]
    return rows[torch.cat((torch.ones(1, dtype=torch.bool), rows[:, 0].diff() != 0))]


def _ids(context: Context, queries: SomeQueries, rows: int) -> Tensor:
    """Run-wide ids of the tokens of queries, [B, q]; packed rows may be concatenated."""
    first_B, at = context.first_ids_B, torch.arange(*queries.at, device=context.first_ids_B.device)
    if rows == len(first_B):
        return first_B[:, None] + at
    assert context.part is not None, "rows that are whole are apart"
    length = context.row_length(num_tokens(context.part.spans))
    return (first_B[at // length] + at % length)[None]


def _indexers(model: Stage) -> list[Indexer]:
    return [module for module in model.modules() if isinstance(module, Indexer)]


def _router(layer: int) -> str:
    return f"{layer}.router"


def _indexer(layer: int) -> str:
    return f"{layer}.indexer"
