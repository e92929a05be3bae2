"""Lower bounds on the memory of a million layouts at once; `search.bound_tables` has the method."""

from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import NDArray

from fivefold.config.config import Config
from fivefold.counts.policy import engine_policy
from fivefold.description.activations import (
    Saved,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.description.kinds import layer_kinds
from fivefold.description.layers import describe
from fivefold.description.running import Running
from fivefold.description.shape import count_parameters
from fivefold.pipeline.schedules.registry import Shape
from fivefold.predict.memory.sizes import deferred_bytes
from fivefold.search.bound_tables import (
    EMBEDDING,
    FOR_MEMORY,
    HEAD,
    KINDS,
    LAYERS,
    PREDICTION,
    SHARDING,
    Cells,
    Ranks,
    Values,
    parameter_cells,
    sample_layers,
)
from fivefold.search.space import SHARDINGS, Space


def memory_bound(space: Space, ranks: Ranks, *, estimate: bool = False) -> Values:
    """A lower bound on the allocated bytes of the fullest rank, for every candidate.

    It is the state of the modules on a rank, plus the largest of these sums: the activations in
    flight at the end of the warm-up; or those with one chunk less, and what deferred weight
    gradients (dW) keep or the gradients of one layer; or what is left of both in the drain.
    Gradients that each step makes anew are there only if that many activations are in flight again
    later; at its end they are there alone, unless its only backward made them. An estimate, to
    order layouts by, takes all steps with several microbatches for long ones.
    """
    sharded, of_sharded = space.distinct(SHARDING)
    run, of_run = space.distinct(_RUNNING)
    state, kept = _State(sharded, ranks), _KeptBytes(run, ranks)
    several = space.columns["microbatches"] * space.config.parallel.num_sequence_slices > 1
    best = np.zeros(len(space))
    for which in FOR_MEMORY:
        flying, less = kept.flying(which)
        held = (less + kept.waiting(which))[of_run]
        # A layer's gradients are reduced when their x and dY are gone.
        arriving = state.arriving(which)[of_sharded]
        np.maximum(held, less[of_run] + arriving, out=held)
        # In the drain a layer's x and dY go as its gradients come.
        np.maximum(held, kept.drained(which)[of_run], out=held)
        np.maximum(held, flying[of_run], out=held)
        start, freed = (part[of_sharded] for part in state.on(which))
        meet = several if estimate else kept.again(which)[of_run]
        np.maximum(best, start + held + np.where(meet, freed, 0), out=best)
        np.maximum(best, start + np.where(several, freed, 0), out=best)
    return best


def least_state(config: Config) -> float:
    """Bytes of weights and optimizer state that all ranks of any layout hold together, at least."""
    each = (_parameter_bytes(config, trained=trained) for trained in (True, False))
    trained, frozen = (float(bytes_[:, 0].sum(axis=0).min()) for bytes_ in each)
    model = config.model
    size = count_parameters(model, padded=False).total
    apart = 0 if model.trains_all else count_parameters(model.base, padded=False).total
    return (size - apart) * trained + apart * frozen


_RUNNING = ("partition", "tp", "sp", "cp", "etp", "mbs", "microbatches", "memory")
"""Columns that the bytes of activations depend on."""


class _State:
    """Bytes of weights, gradients and optimizer state."""

    def __init__(self, space: Space, ranks: Ranks) -> None:
        self.space, self.ranks, self.partition = space, ranks, space.columns["partition"]
        self.sizes, self.trained = parameter_cells(space)
        self.shards = {"dense": space.shards, "expert": space.expert_shards}
        each = partial(_parameter_bytes, space.config)
        self.bytes = {trained: each(trained=trained) for trained in (False, True)}

    def on(self, which: int) -> tuple[Values, Values]:
        """Bytes of model state on one of the ranks: at a step's start, and gradients it makes."""
        held = self.ranks.held[self.partition, which]
        at_start, made = np.zeros((2, len(self.space)))
        for number, kind in enumerate(("dense", "expert")):
            trained = self.trained.weighted(held, number)
            frozen = self.sizes.weighted(held, number) - trained
            lasting, freed = self._per_parameter(kind, trained=True)
            at_start += trained * lasting + frozen * self._per_parameter(kind, trained=False)[0]
            made += trained * freed
        return at_start, made

    def arriving(self, which: int) -> Values:
        """Bytes of new gradients during their reduction: of one layer's experts, or of the rest of
        it.

        Only where gradients are sharded: products may add the others to their sums. Less copies of
        their weights, which a step's last backward frees.
        """
        sharded = self.space.config.with_values(data_parallel_sharding_strategy="optim")
        policy = engine_policy(sharded)
        held = self.ranks.held[self.partition, which]
        smallest = np.full(len(self.space), np.inf)
        for kind in LAYERS:
            parts = self.trained.column(kind), self.trained.column(KINDS + kind)
            size = np.maximum(*parts)
            smallest = np.where(held[:, kind] > 0, np.minimum(smallest, size), smallest)
        several = (self.ranks.thinnest[self.partition, which] > 1) & self.space.sharded(
            "splits_gradients"
        )
        return np.where(several, smallest * (policy.reducing - policy.copy), 0.0)

    def _per_parameter(self, kind: str, *, trained: bool) -> Values:
        """[2, N] bytes of a dense parameter, or of experts': at a step's start, and those made."""
        c, (whole, split) = self.space.columns, self.bytes[trained]
        ranks = c["dp"] * c["cp"] if kind == "dense" else self.space.edp
        at = (ranks == 1).astype(np.intp), c["strategy"]
        found: Values = whole[:, *at] + split[:, *at] / self.shards[kind]
        return found


def _parameter_bytes(config: Config, *, trained: bool) -> Values:
    """[2, 2, 2, strategies] bytes of a parameter: whole, or to be divided by the ranks that share
    it; present at a step's start, or as gradients that the step makes; on a rank with others, or
    alone."""
    found = np.zeros((2, 2, 2, len(SHARDINGS)))
    for number, alone in product(range(len(SHARDINGS)), (False, True)):
        asked = config.with_values(data_parallel_sharding_strategy=SHARDINGS[number].name)
        policy, (whole, split) = engine_policy(asked, alone=alone), found[..., int(alone), number]
        off_device = ceil(policy.offloaded)  # a share is rounded up to whole layers
        here = 1 - off_device
        lasting = policy.masters(here, off_device, 0) + here * policy.moments
        if not trained:
            lasting, policy = policy.masters(0, 0, 1), replace(policy, gradient=0.0)
        (split if policy.splits_optimizer else whole)[0] += lasting
        if not policy.splits_copy:
            whole[0] += min(policy.copy, policy.narrow_copy)
        if policy.splits_gradient:
            split[int(policy.frees_gradients)] += here * policy.gradient
        else:
            whole[int(policy.frees_gradients)] += policy.gradient
    return found


class _KeptBytes:
    """Bytes of activations kept between forward and backward."""

    def __init__(self, space: Space, ranks: Ranks) -> None:
        self.space, self.ranks = space, ranks
        names = ("tp", "sp", "etp", "memory")
        self.per_token = Cells(space, 2 * KINDS, (names, _saved))
        self._limited = space.config.memory.recompute_in_flight_limit is not None
        c = space.columns
        self.partition, self.count = c["partition"], c["microbatches"]
        self.tokens = c["mbs"] * (space.config.training.seq_length / c["cp"])
        self.is_long = self.count >= 2 * ranks.size[self.partition]

    def _chunks(self, which: int, start: int) -> Values:
        """[N, C] bytes that a microbatch keeps in each stage of a rank, without the loss."""
        per_token = self.per_token.table[self.per_token.index, start : start + PREDICTION + 1]
        counts = self.ranks.chunk[self.partition, which][:, :, : PREDICTION + 1]
        found: Values = np.einsum("nck,nk->nc", counts, per_token) * self.tokens[:, None]
        return found

    def _smallest(self, chunks: Values) -> Values:
        """The fewest bytes of any stage that exists on the rank."""
        there = np.arange(chunks.shape[1]) < self.ranks.stages[self.partition][:, None]
        found: Values = np.where(there, chunks, np.inf).min(axis=1)
        return found

    def flying(self, which: int) -> tuple[Values, Values]:
        """Bytes of all chunks in flight on a rank, and of all but those in their backward."""
        ranks, partition, chunks = self.ranks, self.partition, self._chunks(which, 0)
        each = np.minimum(ranks.kept[partition, which], self.count[:, None])
        in_v = self.space.by_partition(lambda each: each.known.shape is Shape.V)
        known = each.any(axis=1) & (~in_v | self.is_long)
        few = in_flight_in_v(self.space, ranks, which) * self._smallest(chunks)
        kept = np.where(known, (each * chunks).sum(axis=1), few)
        if self._limited:  # any backward needs one of them
            kept = self._smallest(chunks)
        # The first dW may follow some more backwards, with no forwards left for them.
        late = np.where(self.is_long, 0, ranks.deferred[partition, which] - 1)
        waits = np.where(np.isfinite(late), late, 0)
        less = np.maximum(kept - (1 + waits) * chunks.max(axis=1), 0) * np.isfinite(late)
        held = ranks.held[partition, which]
        return kept + self.per_token.column(HEAD) * held[:, HEAD] * self.tokens, less

    def again(self, which: int) -> NDArray[np.bool_]:
        """Whether the same number of chunks is in flight again after gradients of all stages
        exist."""
        fewer = (self.ranks.kept[self.partition, which] < self.count[:, None]).all(axis=1)
        found: NDArray[np.bool_] = fewer & self.is_long
        return found

    def drained(self, which: int) -> Values:
        """Bytes of activations and deferred dW in the drain, when most dW are deferred."""
        if self._limited:
            return np.zeros(len(self.space))
        found: Values = sum(
            (self.ranks.drained[self.partition, which, n] * self._chunks(which, start)).sum(axis=1)
            for n, start in enumerate((0, KINDS))
        )
        return np.where(self.is_long, found, 0)

    def waiting(self, which: int) -> Values:
        """Bytes kept for deferred dW."""
        deferring = self.ranks.deferred[self.partition, which] - 1  # when the first of these runs
        chunks = np.where(np.isfinite(deferring) & self.is_long, deferring, 0)
        return chunks * self._smallest(self._chunks(which, KINDS))


def _saved(config: Config) -> list[float]:
    """Bytes per token that a module of each kind keeps for the backward, and those kept until its
    dW."""
    model, running = config.model, Running.of(config)
    saved: dict[int, Saved] = {
        place: total(
            total(saved_activations(model, layer_kinds(model)[kind], running)) for kind in kinds
        )
        for place, kinds in sample_layers(model).items()
    }
    saved |= {
        EMBEDDING: total(embedding_bytes(model, running)),
        HEAD: total(loss_bytes(model, running)),
    }
    kept = [saved[kind].kept if kind in saved else 0.0 for kind in range(KINDS)]
    waiting = [0.0] * KINDS
    for place, (kind, *_) in sample_layers(model).items():
        if not kind.predicts:
            own = running.of_kind(kind)
            waiting[place] = deferred_bytes(describe(model, kind).operations, own)
    return kept + waiting


def in_flight_in_v(space: Space, ranks: Ranks, which: int) -> Values:
    """Fewest chunks that a rank must hold at some time in a V schedule; 1 for other schedules.

    The first rank fills up with its first stage and the last rank with both of its stages; the
    other ranks reach their peak only with enough microbatches.
    """
    partition, count = space.columns["partition"], space.columns["microbatches"]
    p, r = ranks.size[partition], ranks.index[partition, which]
    names = space.by_partition(lambda each: each.schedule)
    peak = np.select([names == "v_half", names == "v_min"], [p, 2 * p // 3], 2 * p)
    both = 2 * np.minimum(count, peak // 2)
    some = np.where(r == 0, np.minimum(count, peak), np.where(count >= 2 * p, peak, 1))
    in_v = space.by_partition(lambda each: each.known.shape is Shape.V)
    found: Values = np.where(in_v, np.maximum(np.where(r == p - 1, both, some), 1), 1)
    return found
