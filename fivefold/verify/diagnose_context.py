"""Losses that one device gets with typical context-parallel mistakes, to explain a run's loss.

Each mistake is made on the plain model, without communication; if the loss equals the run's, the
mistake is reported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fivefold.config.config import Config
from fivefold.config.data import IGNORED
from fivefold.context.install import shards_of
from fivefold.data.packing import Microbatch
from fivefold.model.attention.blockwise import Keys, Queries
from fivefold.model.attention.grouped_query import AttentionBlock, Scope, attention
from fivefold.model.batch import Batch, taken
from fivefold.model.dropout import HeadDropout
from fivefold.model.shards import MicrobatchShare, Shards
from fivefold.model.transformer import Stage
from fivefold.train.batches import as_batch


def losses_by_mistake(
    config: Config, model: Stage, samples: Sequence[Microbatch], step: int
) -> Iterator[tuple[str, float]]:
    """(description of a mistake, summed loss of the samples if one device makes it).

    Args:
        config: configuration of the run, with context parallelism.
        model: plain model with the run's weights; restored afterwards.
        samples: microbatches.
        step: step from 0, which dropout depends on.
    """
    batches = [as_batch(sample, step) for sample in samples]
    yield (
        "positions are counted from the first token of each context-parallel rank",
        _loss(model, [_miscounted(config, batch) for batch in batches]),
    )
    kinds = config.parallel.cp_comm_type
    every = [layer.self_attn for layer in model.transformer_layers]
    layers = [module for module in every if isinstance(module, AttentionBlock)]
    for text, mistakes in _MISTAKES.items():
        wrong = [module for module in layers if kinds[module.layer % len(kinds)] in mistakes]
        if not wrong:
            continue
        total = 0.0
        for batch in batches:
            shards = _shards(config, batch)
            for module in wrong:
                kind = kinds[module.layer % len(kinds)]
                seen = shards.seeing(config.model.reach_of(module.layer))
                module.kernel = mistakes[kind](seen, _inner_size(config, kind), batch.token_ids)
            total += _loss(model, [batch])
        for module in wrong:
            module.kernel = attention
        yield text, total


def of_rank(config: Config, batch: Batch, rank: int) -> Batch:
    """A whole microbatch in which only one context-parallel rank's tokens have a loss."""
    own = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    shards = _shards(config, batch)
    for start, stop in shards.chunks[rank]:
        own.view(shards.rows, -1)[:, start:stop] = True
    return without_losses(batch, ~own)


def without_losses(batch: Batch, lost_BS: Tensor) -> Batch:
    """A batch with the losses of some tokens removed, at all depths."""
    further = batch.mtp_labels
    return replace(
        batch,
        labels=batch.labels.masked_fill(lost_BS, IGNORED),
        mtp_labels=None if further is None else further.masked_fill(lost_BS, IGNORED),
    )


def _loss(model: Stage, batches: Sequence[Batch]) -> float:
    with torch.no_grad():
        return sum(float(model(None, batch)) for batch in batches)


def _shards(config: Config, batch: Batch) -> Shards:
    return shards_of(batch, config.model.widest_window, config.parallel.context_parallel_size)


def _inner_size(config: Config, kind: str) -> int:
    """Number of ranks that exchange heads for tokens."""
    sizes = config.parallel.hierarchical_context_parallel_sizes
    everybody = config.parallel.context_parallel_size
    return {"p2p": 1, "a2a": everybody}.get(kind) or sizes[0]


def _miscounted(config: Config, batch: Batch) -> Batch:
    shards = _shards(config, batch)
    positions = torch.empty_like(batch.positions)
    for rank in range(len(shards.chunks)):
        part = MicrobatchShare(shards, rank)
        place = torch.arange(taken(positions, part).shape[1])
        _put(positions, part, place.expand(shards.rows, -1))
    return replace(batch, positions=positions)


@dataclass(frozen=True)
class _LacksLastKeys:
    """An attention kernel in which queries miss the keys that reach their rank last.

    Attributes:
        shards: how ranks split the microbatch.
        inner: number of ranks that count as one.
        ids: run-wide ids of the tokens [B, S], which dropout depends on.
    """

    shards: Shards
    inner: int
    ids: Tensor

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scope: Scope, drop: HeadDropout | None
    ) -> Tensor:
        """See `model.attention.grouped_query.Kernel`."""
        shards = self.shards.merged(self.inner)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        for rank in range(len(shards.chunks)):
            part = MicrobatchShare(shards, rank)
            queries = Queries(taken(q, part), k.shape[2], drop, taken(self.ids, part), scope.scores)
            queries.begin(v.shape[-1], scope.sinks)
            arriving = _sources(part)
            for source in arriving[:-1] or arriving:
                there = MicrobatchShare(shards, source)
                blocks = shards.blocks(rank, there.spans)
                keys, values, ids = (taken(x, there) for x in (k, v, self.ids))
                queries.meet(Keys(keys, values, blocks, there.spans, ids=ids))
            _put(out, part, queries.out)
        return out


def _sources(part: MicrobatchShare) -> list[int]:
    """Ranks whose keys reach a rank, in order of arrival, its own first."""
    size = len(part.shards.chunks)
    others = [(part.rank - step) % size for step in range(1, size)]
    whole = part.shards.mask.whole
    return [part.rank, *(rank for rank in others if whole or part.shards.sent(rank, part.rank))]


@dataclass(frozen=True)
class _InRankOrder:
    """An attention kernel that leaves exchanged tokens in rank order, as if that were the order of
    the row.

    Attributes: see `_LacksLastKeys`.
    """

    shards: Shards
    inner: int
    ids: Tensor

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scope: Scope, drop: HeadDropout | None
    ) -> Tensor:
        """See `model.attention.grouped_query.Kernel`."""
        order = self._order()
        rows = self.shards.rows
        q, k, v = (x.reshape(rows, -1, *x.shape[2:])[:, order].reshape(x.shape) for x in (q, k, v))
        out = attention(q, k, v, scope, drop)
        back = out.new_empty(out.shape).view(rows, -1, *out.shape[2:])
        back[:, order] = out.reshape(back.shape)
        return back.reshape(out.shape)

    def _order(self) -> Tensor:
        """The token that is used at each position of a row."""
        chunks = self.shards.chunks
        order = torch.empty(self.shards.mask.starts[-1], dtype=torch.int64)
        for first in range(0, len(chunks), self.inner):
            spans = [span for own in chunks[first : first + self.inner] for span in own]
            exchanged = torch.cat([torch.arange(*span) for span in spans])
            order[exchanged.sort().values] = exchanged
        return order


def _put(values: Tensor, part: MicrobatchShare, own: Tensor) -> None:
    """The inverse of `taken`: write a rank's part into the values of all tokens."""
    rows = values.view(part.shards.rows, -1, *values.shape[2:])
    at = 0
    for start, stop in part.spans:
        rows[:, start:stop] = own[:, at : at + stop - start]
        at += stop - start


Mistake = Callable[[Shards, int, Tensor], _LacksLastKeys | _InRankOrder]
_MISTAKES: Mapping[str, Mapping[str, Mistake]] = MappingProxyType(
    {
        "queries lack the keys that reach a context-parallel rank last": {
            "p2p": _LacksLastKeys,
            "a2a+p2p": _LacksLastKeys,
        },
        "tokens exchanged for heads are in the order of the ranks, not of the rows": {
            "a2a": _InRankOrder,
            "a2a+p2p": _InRankOrder,
        },
    }
)
