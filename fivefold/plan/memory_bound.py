"""A lower bound on the memory of a million layouts at once: `plan.blocks` says how."""

import numpy as np

from fivefold.config.config import Config
from fivefold.model.activations import (
    Running,
    Saved,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.plan.blocks import (
    DENSE,
    EMBEDDING,
    EXPERTS,
    HEAD,
    KINDS,
    PREDICTION,
    SHARDING,
    Cells,
    Ranks,
    Values,
    block_parameters,
    sample_layers,
)
from fivefold.plan.memory import waiting_bytes
from fivefold.plan.space import STRATEGIES, Column, Space
from fivefold.state import engine_policy


def memory_bound(space: Space, ranks: Ranks) -> Values:
    """Bytes that no placement of tensors in time can get below.

    The state of the blocks on a rank, with the larger of what is in flight when its warm-up ends,
    and of what is there while the gradients of a layer's weights arrive: one chunk less, what its
    schedule leaves waiting for dW, and those gradients.
    """
    sharded, of_sharded = space.distinct(SHARDING)
    run, of_run = space.distinct(_RUNNING)
    state, kept = _State(sharded), _Kept(run)
    best = np.zeros(len(space))
    for which in range(3):
        behind = kept.less_one(ranks, which) + kept.waiting(ranks, which)
        held = behind[of_run]
        held += state.arriving(ranks, which)[of_sharded]
        np.maximum(held, kept.flying(ranks, which)[of_run], out=held)
        held += state.on(ranks, which)[of_sharded]
        np.maximum(best, held, out=best)
    return best


_RUNNING = ("way", "tp", "sp", "cp", "etp", "mbs", "microbatches", "memory")
"""The columns that activations depend on."""


class _State:
    """Bytes of weights, gradients and optimizer state."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.sizes = Cells(space, (("tp", "ep", "etp"), block_parameters))
        c = space.columns
        experts = c["dp"] * c["cp"] * c["tp"] // (c["ep"] * c["etp"])
        inside = experts // c["instances"]
        self.shards = {
            "dense": space.shards,
            "expert": np.where(space.shards == 1, 1, np.maximum(inside, 1)),
        }

    def on(self, ranks: Ranks, which: int) -> Values:
        """Of one of the ranks."""
        held = ranks.held[self.space.columns["way"], which]
        dense = self.sizes.weighted(held)
        expert = self.sizes.weighted(held, KINDS)
        return dense * self._per_parameter("dense") + expert * self._per_parameter("expert")

    def arriving(self, ranks: Ranks, which: int) -> Values:
        """Gradients of a layer's weights, fresh and being reduced, where shards are summed."""
        way = self.space.columns["way"]
        config = self.space.config
        parallel = config.with_values(data_parallel_sharding_strategy="optim").parallel
        reducing = engine_policy(parallel, config.training.precision).reducing
        held = ranks.held[way, which]
        smallest = np.full(len(self.space), np.inf)
        for kind in (DENSE, EXPERTS):
            size = self.sizes.column(kind) + self.sizes.column(KINDS + kind)
            smallest = np.where(held[:, kind] > 0, np.minimum(smallest, size), smallest)
        several = (ranks.thinnest[way, which] > 1) & (self.space.columns["strategy"] > 0)
        return np.where(several, smallest * reducing, 0.0)

    def _per_parameter(self, kind: str) -> Values:
        config, shards = self.space.config, self.shards[kind]
        each = np.zeros(len(STRATEGIES)), np.zeros(len(STRATEGIES))
        for number, strategy in enumerate(STRATEGIES):
            parallel = config.with_values(data_parallel_sharding_strategy=strategy).parallel
            policy = engine_policy(parallel, config.training.precision)
            whole = 0.0 if policy.splits_copy else policy.copy
            split = (policy.master + policy.moments) if policy.splits_optimizer else 0.0
            whole += 0.0 if policy.splits_optimizer else policy.master + policy.moments
            split += policy.gradient if policy.splits_gradient else 0.0
            whole += 0.0 if policy.splits_gradient else policy.gradient
            each[0][number], each[1][number] = whole, split
        strategy_column = self.space.columns["strategy"]
        found: Values = each[0][strategy_column] + each[1][strategy_column] / shards
        return found


class _Kept:
    """Bytes kept between forward and backward."""

    def __init__(self, space: Space) -> None:
        self.space = space
        names = ("tp", "sp", "etp", "memory")
        self.per_token = Cells(space, (names, _saved))
        c = space.columns
        self.tokens = c["mbs"] * (space.config.training.seq_length / c["cp"])

    def _share(self, ranks: Ranks, which: int, chunks: Values) -> Values:
        """The part of a rank's layers in so many chunks, at least: all may be the thinnest."""
        way = self.space.columns["way"]
        layers = ranks.held[way, which][:, : PREDICTION + 1].sum(axis=1)
        thinnest = ranks.thinnest[way, which]
        found: Values = np.minimum(
            chunks * thinnest / np.maximum(layers, 1), chunks / ranks.chunks[way]
        )
        return found

    def _of_layers(self, ranks: Ranks, which: int, start: int) -> Values:
        held = ranks.held[self.space.columns["way"], which][:, : PREDICTION + 1]
        return self.per_token.weighted(held, start) * self.tokens

    def flying(self, ranks: Ranks, which: int) -> Values:
        """All chunks in flight on one of the ranks."""
        held = ranks.held[self.space.columns["way"], which]
        share = self._share(ranks, which, in_flight(self.space, ranks, which))
        loss = self.per_token.column(HEAD) * held[:, HEAD] * self.tokens
        return self._of_layers(ranks, which, 0) * share + loss

    def less_one(self, ranks: Ranks, which: int) -> Values:
        """The same without the chunk whose backward runs."""
        chunks = np.maximum(in_flight(self.space, ranks, which) - 1, 0)
        return self._of_layers(ranks, which, 0) * self._share(ranks, which, chunks)

    def waiting(self, ranks: Ranks, which: int) -> Values:
        """What waits for its dW."""
        chunks = waiting_chunks(self.space, ranks, which)
        return self._of_layers(ranks, which, KINDS) * self._share(ranks, which, chunks)


def _saved(config: Config) -> list[float]:
    """Bytes per token that a block of each kind keeps, then those that wait for its dW."""
    model, running = config.model, Running.of(config)
    saved: dict[int, Saved] = {
        kind: total(saved_activations(model, layer, running))
        for kind, layer in sample_layers(model).items()
    }
    saved |= {
        EMBEDDING: total(embedding_bytes(model, running)),
        HEAD: total(loss_bytes(model, running)),
    }
    kept = [saved[kind].kept if kind in saved else 0.0 for kind in range(KINDS)]
    waiting = [0.0] * KINDS
    for kind, layer in sample_layers(model).items():
        if kind != PREDICTION:
            waiting[kind] = waiting_bytes(model, running, model.is_moe(layer))
    return kept + waiting


def in_flight(space: Space, ranks: Ranks, which: int) -> Values:
    """Chunks that one of the ranks holds at once, at least, at the end of its warm-up."""
    way, count = space.columns["way"], space.columns["microbatches"]
    p, v, r = ranks.size[way], ranks.chunks[way], ranks.index[way, which]

    def in_a_v(peak: Column) -> Column:
        """The first rank fills with its first stage, the last with both; others only in the end."""
        both = 2 * np.minimum(count, peak // 2)
        some = np.where(r == 0, np.minimum(count, peak), np.where(count >= 2 * p, peak, 1))
        return np.where(r == p - 1, both, some)

    peaks = {
        "1f1b": np.minimum(count, p - r),
        "zb_h1": np.minimum(count, p - r),
        "zb_h2": np.minimum(count, 2 * (p - r) - 1),
        "interleaved_1f1b": np.minimum(count * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        "interleaved_zb": np.minimum(count * v, p - r + (v - 1) * p),
        "zb_v": in_a_v(2 * p),
        "dualpipe_v": in_a_v(2 * p),
        "v_half": in_a_v(p),
        "v_min": in_a_v(2 * p // 3),
    }
    names = np.array([w.schedule for w in space.ways])[way]
    flying = np.ones(len(space))
    for name, peak in peaks.items():
        flying = np.where(names == name, np.maximum(peak, 1), flying)
    return flying


def waiting_chunks(space: Space, ranks: Ranks, which: int) -> Values:
    """Chunks of one of the ranks that wait for dW, at least, beside one less than `in_flight`."""
    way, count = space.columns["way"], space.columns["microbatches"]
    p, r = ranks.size[way], ranks.index[way, which]
    late = {"zb_h1": r, "interleaved_zb": r, "zb_h2": 2 * r}
    names = np.array([w.schedule for w in space.ways])[way]
    waiting = np.zeros(len(space))
    for name, chunks in late.items():
        waiting = np.where((names == name) & (count >= 2 * p), chunks, waiting)
    return waiting
