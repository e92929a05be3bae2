"""Predicts the time of a training step: its pipeline program, and the work before and after it.

The program is simulated event by event with the layer times of `predict.times.layer`. The exposed
parts of gathering parameters, reducing gradients and the optimizer are added to it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, islice
from math import exp, inf

from fivefold.config.model import ModelConfig
from fivefold.config.sharding import SHARDING, Sharding
from fivefold.counts.blocks import stage_blocks
from fivefold.counts.offload import times_reduced
from fivefold.counts.policy import engine_policy
from fivefold.counts.state import stages_held
from fivefold.description.shape import StageParts, training_flops
from fivefold.layout import Layout
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.schedules.registry import with_copies
from fivefold.pipeline.split.stages import StageSpec
from fivefold.predict.cluster import Cluster
from fivefold.predict.data_parallel.muon import orthogonalising_seconds
from fivefold.predict.data_parallel.per_step import UNKNOWN, StepTransfers, step_transfers
from fivefold.predict.data_parallel.transfers import StageTransfers, data_groups, exposed, moves
from fivefold.predict.data_parallel.update import (
    bringing_seconds,
    leaving_seconds,
    offload_seconds,
    summing_seconds,
    update_seconds,
)
from fivefold.predict.prediction import (
    Prediction,
    TimePart,
    interval,
    sends_dx_early,
    unusual,
)
from fivefold.predict.program.makespan import Clock
from fivefold.predict.program.pairs import Paired, pair_seconds
from fivefold.predict.software import Software
from fivefold.predict.times.communication import gather, hop_seconds
from fivefold.predict.times.compute import Phases
from fivefold.predict.times.layer import LayerTimes, TimesCache, message_bytes
from fivefold.predict.times.stage import StageKind, Times


def predict(layout: Layout, cluster: Cluster, software: Software | None = None) -> Prediction:
    """Predict the time of a training step.

    Args:
        layout: a checked layout; `planned=True` suffices.
        cluster: the hardware; it needs at least as many GPUs as the layout has ranks.
        software: the framework's kernels and habits; None: those of Fivefold.
    """
    (prediction,) = predict_all([layout], cluster, software)
    return prediction


def predict_all(
    layouts: Sequence[Layout],
    cluster: Cluster,
    software: Software | None = None,
    times_cache: TimesCache | None = None,
) -> list[Prediction]:
    """Predict the step times of several layouts; a program that they share is simulated once.

    Args:
        layouts: checked layouts; `planned=True` suffices.
        cluster: the hardware; it needs at least as many GPUs as the layouts have ranks.
        software: the framework's kernels and habits; None: those of Fivefold.
        times_cache: times to share with other layouts, as `LayerTimes` takes them.
    """
    predictors = [
        _Predictor(each, cluster, software or Software(), times_cache) for each in layouts
    ]
    costs = [[each.costs, replace(each.costs, hop=0.0)] for each in predictors]
    walked = _walk([each.clock for each in predictors], costs, [[p.per_step] for p in predictors])
    return [
        each.prediction(whole, still, longer)
        for each, ((whole, still), (longer,)) in zip(predictors, walked, strict=True)
    ]


def program_times(
    layouts: Sequence[Layout],
    sent: Sequence[Sequence[tuple[Sharding, Sequence[StageTransfers]]]],
    cluster: Cluster,
    times_cache: TimesCache,
) -> list[tuple[float, list[float]]]:
    """Predicted seconds of each layout's pipeline program, without the rest of the step.

    Args:
        layouts: checked layouts; `planned=True` suffices.
        sent: for each layout, strategies and transfers of each stage; the other numbers of the
            result are seconds by which each of these makes the program longer, at least.
        cluster: the hardware.
        times_cache: times to share with other layouts, as `LayerTimes` takes them.
    """
    predictors = [_Predictor(each, cluster, Software(), times_cache) for each in layouts]
    per_step = [
        [each.sent(sharding, moves, update=UNKNOWN) for sharding, moves in others]
        for each, others in zip(predictors, sent, strict=True)
    ]
    walked = _walk([p.clock for p in predictors], [[p.costs] for p in predictors], per_step)
    return [(seconds, longer) for (seconds,), longer in walked]


def _walk(
    clocks: Sequence[Clock],
    costs: Sequence[Sequence[Costs]],
    per_step: Sequence[Sequence[StepTransfers]],
) -> list[tuple[list[float], list[float]]]:
    """Seconds of each layout's program for each of its costs, and by how much each option of
    communication once a step lengthens it, with the first costs; layouts with equal programs share
    one walk."""
    alike: dict[Clock, list[int]] = {}
    for number, clock in enumerate(clocks):
        alike.setdefault(clock, []).append(number)
    found: list[tuple[list[float], list[float]]] = [([], [])] * len(clocks)
    for clock, numbers in alike.items():
        starts = accumulate((len(costs[number]) for number in numbers), initial=0)
        sent = [(of, each) for of, n in zip(starts, numbers, strict=False) for each in per_step[n]]
        seconds, more = map(iter, clock.walk([each for n in numbers for each in costs[n]], sent))
        for n in numbers:
            found[n] = [*islice(seconds, len(costs[n]))], [*islice(more, len(per_step[n]))]
    return found


class _Predictor:
    """The computation of one predicted step time.

    One class because its parts (stages, sharding, messages, optimizer) all follow from the same
    layout, cluster and software, and cache what they share.
    """

    def __init__(
        self, layout: Layout, cluster: Cluster, software: Software, times_cache: TimesCache | None
    ) -> None:
        self.layout, self.cluster, self.software = layout, cluster, software
        self.grid, self.parallel = layout.grid, layout.config.parallel
        self.times = LayerTimes(layout, cluster, software, times_cache)
        self.policy = engine_policy(layout.config)
        known: dict[StageKind, Times] = {}
        self._paired: dict[StageKind, Paired] = {}
        self._known_moves: dict[StageKind, StageTransfers] = {}
        self.kinds = [StageKind.of(layout, stage) for stage in range(len(layout.split.stages))]
        for kind, spec in zip(self.kinds, layout.split.stages, strict=True):
            if kind not in known:
                known[kind] = self._stage(kind, spec)
        self.stages = tuple(known[kind] for kind in self.kinds)
        totals = {kind: times.total for kind, times in known.items()}
        self.totals = tuple(totals[kind] for kind in self.kinds)

    @cached_property
    def clock(self) -> Clock:
        """The timer of the layout's pipeline program."""
        return Clock.of(self.layout, eager=sends_dx_early(self.layout, self.software))

    @cached_property
    def _ranks(self) -> Collection[tuple[int, ...]]:
        """The stages of one rank of each kind; all other ranks hold stages of the same kinds."""
        ranks = (stages_held(self.layout, rank) for rank in range(self.grid.pp))
        return {tuple(self.kinds[stage] for stage in own): own for own in ranks}.values()

    def _stage(self, kind: StageKind, spec: StageParts) -> Times:
        total, host = Times(), 0.0
        for (which, again), count in kind.layers:
            total = total + self.times.layer(which, again) * count
            host += self.times.host(which) * count
        self._paired[kind] = Paired(total, host)
        looked_up = kind.embedding + kind.mtp
        if looked_up:
            total = total + self.times.embedding() * looked_up
        if kind.head:
            total = total + self.times.head()
        sharded = self._sharded(total, kind, spec)
        return total + Times(dp=sharded, offload=self._brought(total.total + sharded, spec))

    def _brought(self, work: Phases, spec: StageParts) -> Phases:
        """Seconds by which copies of offloaded weights arrive after `work` has ended."""
        if not self.policy.offloads_weights:
            return Phases()
        shard, expert = data_groups(self.layout, self.cluster)
        parameters = sum(
            block.count * (block.sizes[0] / shard.size + block.sizes[1] / expert.size)
            for block in stage_blocks(self.layout, spec)
        )
        return self.times.later(bringing_seconds(self.cluster, self.policy, parameters), work)

    def _moves(self, kind: StageKind, spec: StageParts) -> StageTransfers:
        """Data-parallel communication of a stage."""
        if kind not in self._known_moves:
            self._known_moves[kind] = moves(self.layout, self.cluster, self.software, spec)
        return self._known_moves[kind]

    @property
    def _sharding(self) -> Sharding:
        """The strategy by which the software communicates, which may be less often than it
        shards."""
        sharding = self.parallel.sharding
        once = self.software.reduces_once and self.grid.pp > 1 and sharding.splits_optimizer
        return SHARDING["optim"] if once else sharding

    def _sharded(self, times: Times, kind: StageKind, spec: StageParts) -> Phases:
        """Exposed seconds of the transfers in every microbatch (ZeRO-2 and ZeRO-3)."""
        sharding, software = self._sharding, self.software
        if not sharding.splits_gradients:
            return Phases()
        moved, defers = self._moves(kind, spec), self.times.defers
        gathered, reduced = moved.gathered - moved.first, moved.reduced - moved.last
        ends = Phases(moved.first, dw=moved.last) if defers else Phases(moved.first, moved.last)
        if not sharding.splits_parameters:
            gathered, ends = 0.0, ends._replace(forward=0.0)
        work = times.total
        if self.layout.overlaps_pairs:  # messages that a pair hides cannot be hidden elsewhere
            work = work + times.ep * -1
        recomputed = self.layout.config.memory.recompute_granularity == "full"
        again = 2 if recomputed and software.gathers_to_recompute else 1
        each = partial(exposed, self.cluster.gpu, work, gathered, apart=defers, again=again)
        found = each(reduced)
        if software.gather_rate is not None:  # gathers at a rate of their own are not hidden
            found = found._replace(forward=gathered)
        whole = found + ends
        if software.reduces_last and sharding.splits_parameters and not defers:
            first = each(0.0).dx  # the mean over the microbatches
            whole = whole._replace(dx=first + (whole.dx - first) / self.layout.num_microbatches)
        return whole

    @cached_property
    def hop(self) -> float:
        """Seconds of a message to the next pipeline rank."""
        ranks, size, arrived = self.grid.pp, message_bytes(self.times), 0.0
        if self.times.parts < self.grid.tp and self.software.scatters_hops and ranks > 1:
            arrived = gather(self.cluster, self.times.tp, size)
            size /= self.grid.tp
        return hop_seconds(self.cluster, ranks, self.grid.ranks_per_stage, size) + arrived

    @property
    def _waits_for_hops(self) -> bool:
        """Whether stages are idle while their messages travel."""
        waits = self.software.waits_for_hops
        plain = (self.parallel.num_virtual_stages_per_pipeline_rank or 1) == 1
        return waits == "always" or (waits == "plain" and plain)

    @cached_property
    def costs(self) -> Costs:
        """Times of the pipeline actions; a backward includes its recomputation."""
        totals = self.totals * self.layout.num_copies
        smallest = 1e-9  # seconds of an empty stage
        waits = self.hop if self._waits_for_hops else 0.0
        costs = Costs(
            tuple(max(t.forward, smallest) + waits for t in totals),
            tuple(max(t.dx, smallest) + waits for t in totals),
            tuple(t.dw for t in totals),
            self.hop - waits,
        )
        if not self.layout.overlaps_pairs:
            return costs
        kinds = self.kinds * self.layout.num_copies
        delays = self.layout.config.parallel.delay_wgrad_compute
        pairs = pair_seconds(self.cluster.gpu, costs, kinds, self._paired, delays=delays)
        return replace(costs, fb=pairs)

    @cached_property
    def per_step(self) -> StepTransfers:
        """Communication once a step."""
        parts = zip(self.kinds, self.layout.split.stages, strict=True)
        each = [self._moves(kind, spec) for kind, spec in parts]
        return self.sent(self._sharding, each, self._optimizer[0])

    def sent(
        self, sharding: Sharding, moves: Sequence[StageTransfers], update: float
    ) -> StepTransfers:
        """Communication once a step of a strategy, given each stage's transfers and the update's
        time."""
        slices, split = self.parallel.num_sequence_slices, self.layout.split
        stages = [
            (move, total.forward / slices, len(spec.layers))
            for move, total, spec in zip(moves, self.totals, split.stages, strict=True)
        ]
        placement = with_copies(split.placement, self.layout.num_copies)
        gpu, by_block = self.cluster.gpu, self.software.gathers_by_block
        return step_transfers(gpu, self.parallel, sharding, stages, placement, update, by_block)

    @cached_property
    def _optimizer(self) -> tuple[float, float]:
        """Seconds of the gradient norm and of the update for the fullest rank's shard.

        Those of the device, and those of the host for what is in its memory.
        """
        shard, expert = data_groups(self.layout, self.cluster)
        sharded = self.policy.splits_optimizer
        worst, most, backward, muon = (0.0, 0.0), 0, inf, 0.0
        for own in self._ranks:
            parts = [self.layout.split.stages[s] for s in own]
            dense, experts, tensors = self._trained(parts)
            muon = max(muon, orthogonalising_seconds(self.layout, self.cluster, parts))
            share = dense / shard.size, experts / expert.size
            work = sum((self.totals[s] for s in own), Phases())
            backward = min(backward, work.dx + work.dw)
            worst = max(worst, share if sharded else (dense, experts), key=sum)
            most = max(most, tensors)
        host = 0.0
        if self.software.by_tensor:
            host = most * _TENSOR_OPERATIONS * self.cluster.host_operation
        cluster, policy, kept = self.cluster, self.policy, sum(worst)
        times = [times_reduced(self.layout, experts=of_experts) for of_experts in (False, True)]
        late = leaving_seconds(cluster, policy, zip(worst, times, strict=True), backward)
        here = max(update_seconds(cluster, policy, kept), host) + muon
        return here, late + offload_seconds(cluster, policy, kept)

    def _trained(self, stages: Iterable[StageParts]) -> tuple[int, int, int]:
        """Trained weights of a rank's stages: without experts, experts only, and the number of
        tensors."""
        dense = experts = tensors = 0
        for stage in stages:
            for block in stage_blocks(self.layout, stage, trained=True):
                dense += block.count * block.sizes[0]
                experts += block.count * block.sizes[1]
                tensors += block.count * (len(block.dense) + len(block.experts))
        return dense, experts, tensors

    def _summing(self) -> float:
        """Seconds for adding gradients to those of earlier microbatches, unless each microbatch's
        are reduced to shards."""
        if self.software.accumulates_apart != "grouped" or self._sharding.splits_gradients:
            return 0.0
        config, stages, most = self.layout.config, self.layout.split.stages, 0.0
        for own in self._ranks:
            layers = [replace(stages[s], embedding=False, head=False) for s in own]
            narrow, _, _ = self._trained(_narrow_layers(config.model, stage) for stage in layers)
            _, experts, _ = self._trained(layers)
            most = max(most, summing_seconds(self.cluster, config, float(narrow), float(experts)))
        return (self.layout.num_microbatches * self.parallel.num_sequence_slices - 1) * most

    def prediction(self, whole: float, still: float, around: float) -> Prediction:
        """The prediction of a step.

        Args:
            whole: seconds of the pipeline program.
            still: seconds of the same program if its messages took no time.
            around: seconds by which what is sent once a step lengthens the program.
        """
        layout, grid = self.layout, self.grid
        training = layout.config.training
        each = sum(self.stages, Times()) * (layout.num_microbatches / grid.pp)
        paired = self.clock.hidden(self.costs) / grid.pp
        unwaited = max(0.0, paired - each.ep.total)  # pairs hide messages before waits
        repeated = self.clock.repeated(self.costs) / grid.pp
        busy = each.total.total - paired + repeated
        token_flops = training_flops(layout.config.model, layout.config.attended_length).total
        flops = training.step_tokens * token_flops
        peak = self.cluster.gpu.peak.of(layout.config.product_precision)
        ideal = flops / grid.world_size / peak
        optimizer, on_host = self._optimizer
        parts = (
            TimePart("ideal", ideal),
            TimePart("kernel efficiency", each.compute.total + each.host.total - unwaited - ideal),
            TimePart("recompute", each.recompute.total + repeated),
            TimePart("offloading", each.offload.total + on_host),
            TimePart("bubble", still - busy),
            TimePart("TP communication", each.tp.total),
            TimePart("CP communication", each.cp.total),
            TimePart("EP communication", each.ep.total - (paired - unwaited)),
            TimePart("PP communication", whole - still),
            TimePart("DP communication", each.dp.total + around),
            TimePart("optimizer", optimizer + self._summing()),
            TimePart("jitter", self.cluster.straggler_delay(grid.world_size) * whole),
        )
        step = sum(part.seconds for part in parts)
        notes = tuple(unusual(layout, self.cluster))
        width = interval(layout, notes)
        return Prediction(
            layout,
            self.cluster,
            self.software,
            self.costs,
            step,
            step * exp(-width),
            step * exp(width),
            parts,
            flops,
            notes,
        )


_TENSOR_OPERATIONS = 15  # kernels per tensor in AdamW, the norm and the copies


def _narrow_layers(model: ModelConfig, stage: StageSpec) -> StageSpec:
    """A stage without its bf16 layers."""
    return replace(stage, layers=tuple(n for n in stage.layers if not model.is_wide(n)))
