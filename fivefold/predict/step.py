"""How long a training step takes: the pipeline program of its stages' times, and what surrounds it.

The program is run event by event with the times of `predict.layer`; before it lies the gathering of
parameters, after it the reduction of gradients and the optimizer, each as far as it is not hidden.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import exp, log, prod, sqrt

from fivefold.hardware import GPUS
from fivefold.layout import Layout
from fivefold.model.shape import StageParts, training_flops
from fivefold.pipeline.costs import Costs
from fivefold.pipeline.lowering import lower
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import Simulation, simulate
from fivefold.predict.cluster import Cluster
from fivefold.predict.communication import GroupSpan, all_reduce, gather, send, span
from fivefold.predict.compute import Phases, overlapped
from fivefold.predict.layer import Blocks, LayerTimes
from fivefold.predict.makespan import Clock
from fivefold.predict.overlap import Paired, pair_seconds
from fivefold.predict.software import Software
from fivefold.predict.stage_times import Times
from fivefold.predict.update import offload_seconds, update_seconds
from fivefold.state import engine_policy, stage_blocks, stages_held

# Half-widths of the 80 % interval, as logarithms: of the published rows of a kind, four in five lie
# within them (fivefold plan --score). Dense bf16 rows are the oldest and most varied.
_INTERVAL = {"dense": 0.12, "narrow": 0.08, "experts": 0.26}


@dataclass(frozen=True)
class TimePart:
    """A part of the step's time and what it is."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a layout.

    Attributes:
        layout: of which.
        cluster: on what.
        software: run by what.
        costs: of the pipeline program's acts, in seconds.
        step_time: seconds of a step.
        low: and `high`: the step takes between them with a probability of 80 %.
        parts: the waterfall: seconds that add up to step_time.
        model_flops: of a step, forward and backward: causal attention counts half, nothing is
            added for recomputation (`model.shape`).
        notes: in what the layout lies outside of what the planner was fitted on.
    """

    layout: Layout
    cluster: Cluster
    software: Software
    costs: Costs
    step_time: float
    low: float
    high: float
    parts: tuple[TimePart, ...]
    model_flops: float
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of the global batch, over the step and all GPUs."""
        training = self.layout.config.training
        tokens = training.global_batch_size * training.seq_length
        return tokens / self.step_time / self.layout.grid.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs could do at the peak of the precision they multiply in."""
        peak = self.cluster.gpu.peak.of(precision_of(self.layout))
        return self.model_flops / (self.step_time * self.layout.grid.world_size * peak)

    @cached_property
    def simulation(self) -> Simulation:
        """The whole program, event by event."""
        layout = self.layout
        eager = _eager(layout, self.software)
        program = layout.order().executed(pairs=layout.overlaps_pairs, eager=eager)
        return simulate(with_sharding_actions(lower(program, self.costs)), self.costs)


def precision_of(layout: Layout) -> str:
    """In which most multiplications run."""
    training = layout.config.training
    return "fp4" if training.fp4_format else "fp8" if training.fp8_format else training.precision


def predict(layout: Layout, cluster: Cluster, software: Software | None = None) -> Prediction:
    """The time of a step.

    Args:
        layout: checked, if only with `planned=True`.
        cluster: with as many GPUs as the layout has ranks, or more.
        software: that runs it; None: Fivefold.
    """
    (prediction,) = predict_all([layout], cluster, software)
    return prediction


def predict_all(
    layouts: Sequence[Layout],
    cluster: Cluster,
    software: Software | None = None,
    blocks: Blocks | None = None,
) -> list[Prediction]:
    """As `predict` of each; a program that several of them run is walked once.

    Args:
        layouts: checked, if only with `planned=True`.
        cluster: with as many GPUs as the layouts have ranks, or more.
        software: that runs them; None: Fivefold.
        blocks: as `LayerTimes` shares them.
    """
    predictors = [_Predictor(each, cluster, software or Software(), blocks) for each in layouts]
    costs = [[each.costs, replace(each.costs, hop=0.0)] for each in predictors]
    walked = _walk([each.clock for each in predictors], costs)
    return [each.prediction(*times) for each, times in zip(predictors, walked, strict=True)]


def program_times(
    layouts: Sequence[Layout], cluster: Cluster, software: Software, blocks: Blocks
) -> list[float]:
    """Of the steps of `predict_all`, the pipeline's programs alone, in seconds."""
    predictors = [_Predictor(each, cluster, software, blocks) for each in layouts]
    walked = _walk([each.clock for each in predictors], [[each.costs] for each in predictors])
    return [seconds for (seconds,) in walked]


def _walk(clocks: Sequence[Clock], costs: Sequence[Sequence[Costs]]) -> list[list[float]]:
    """Seconds of each layout's program with each of its costs, one walk for layouts alike."""
    alike: dict[Clock, list[int]] = {}
    for number, clock in enumerate(clocks):
        alike.setdefault(clock, []).append(number)
    found: list[list[float]] = [[] for _ in clocks]
    for clock, numbers in alike.items():
        times = iter(clock.makespans([each for number in numbers for each in costs[number]]))
        for number in numbers:
            found[number] = list(islice(times, len(costs[number])))
    return found


def stage_costs(
    layout: Layout, cluster: Cluster, software: Software | None = None
) -> tuple[Costs, tuple[Times, ...]]:
    """The costs of the pipeline program's acts, and the times of each stage by cause."""
    predictor = _Predictor(layout, cluster, software or Software(), None)
    return predictor.costs, predictor.stages


def _eager(layout: Layout, software: Software) -> bool:
    return layout.defers_weights if software.eager_dx is None else software.eager_dx


class _Predictor:
    """The pieces of one prediction."""

    def __init__(
        self, layout: Layout, cluster: Cluster, software: Software, blocks: Blocks | None
    ) -> None:
        self.layout, self.cluster, self.software = layout, cluster, software
        self.grid, self.parallel = layout.grid, layout.config.parallel
        self.times = LayerTimes(layout, cluster, software, blocks)
        self.policy = engine_policy(layout.config)
        known: dict[StageKind, Times] = {}
        self._paired: dict[StageKind, Paired] = {}
        self._known_moves: dict[StageKind, tuple[float, float]] = {}
        self.kinds = [self._kind(spec) for spec in layout.split.stages]
        for kind, spec in zip(self.kinds, layout.split.stages, strict=True):
            if kind not in known:
                known[kind] = self._stage(kind, spec)
        self.stages = tuple(known[kind] for kind in self.kinds)

    @cached_property
    def clock(self) -> Clock:
        """Of the pipeline's program."""
        return Clock.of(self.layout, eager=_eager(self.layout, self.software))

    @cached_property
    def _ranks(self) -> Collection[tuple[int, ...]]:
        """The stages of a rank, for every kind of rank: others hold stages of the same kinds."""
        ranks = (stages_held(self.layout, rank) for rank in range(self.grid.pp))
        return {tuple(self.kinds[stage] for stage in own): own for own in ranks}.values()

    def _kind(self, spec: StageParts) -> "StageKind":
        """Stages of a kind take the same time."""
        memory = self.layout.config.memory
        model = self.layout.config.model
        full = memory.recompute_granularity == "full"
        some = memory.recompute_num_layers if memory.recompute_method == "block" else 1 << 30
        layers: dict[tuple[bool, bool], int] = {}
        for place, layer in enumerate(spec.layers):
            key = (model.is_moe(layer), full and place < some)
            layers[key] = layers.get(key, 0) + 1
        return StageKind(spec.embedding, spec.head, spec.mtp, tuple(sorted(layers.items())))

    def _stage(self, kind: "StageKind", spec: StageParts) -> Times:
        model = self.layout.config.model
        further = ((model.is_moe(model.num_layers), False), kind.mtp)
        total, host = Times(), 0.0
        for (is_moe, recomputed), count in (*kind.layers, further):
            if count:
                total = total + self.times.layer(is_moe, recomputed) * count
                host += self.times.host(is_moe) * count
        self._paired[kind] = Paired(total, host)
        if kind.embedding:
            total = total + self.times.embedding()
        if kind.head:
            total = total + self.times.head()
        return total + Times(dp=self._sharded(total, kind, spec))

    def _data_groups(self) -> tuple[GroupSpan, GroupSpan, GroupSpan]:
        """Shards of dense parameters, their replicas, and shards of experts."""
        grid, cluster = self.grid, self.cluster
        shard = span(cluster, grid.dp_shard * grid.cp, grid.tp)
        replica = span(cluster, grid.dp_replicate, grid.tp * grid.cp * grid.dp_shard)
        expert = span(cluster, grid.edp, grid.ep * grid.etp)
        return shard, replica, expert

    def _moves(self, kind: "StageKind", spec: StageParts) -> tuple[float, float]:
        """Seconds to gather a stage's parameters once, and to reduce its gradients once."""
        if kind not in self._known_moves:
            self._known_moves[kind] = self._moved(spec)
        return self._known_moves[kind]

    def _moved(self, spec: StageParts) -> tuple[float, float]:
        shard, replica, expert = self._data_groups()
        wire = self.software.gradient_bytes or (2 if self.parallel.grad_reduce_in_bf16 else 4)
        cluster = self.cluster
        whole = self.parallel.data_parallel_sharding_strategy == "no_shard"
        gathered = reduced = 0.0
        for block in stage_blocks(self.layout, spec):
            for group, shapes in ((shard, block.dense), (expert, block.experts)):
                sizes = [prod(shape) for shape in shapes]
                for size in sizes if self.software.by_tensor else [sum(sizes)] if sizes else []:
                    if whole:
                        reduced += block.count * all_reduce(cluster, group, size * wire)
                        continue
                    if rate := self.software.gather_rate:
                        gathered += block.count * size * 2 / rate
                        reduced += block.count * size * wire / rate
                        continue
                    gathered += block.count * gather(cluster, group, size * 2)
                    reduced += block.count * gather(cluster, group, size * wire)
                    if group is shard:
                        share = size * wire / shard.size
                        reduced += block.count * all_reduce(cluster, replica, share)
        return gathered, reduced

    @property
    def _strategy(self) -> str:
        """What is communicated when, which may be less often than what is sharded would ask for."""
        strategy = self.parallel.data_parallel_sharding_strategy
        once = self.software.reduces_once and self.grid.pp > 1 and strategy != "no_shard"
        return "optim" if once else strategy

    def _sharded(self, times: Times, kind: "StageKind", spec: StageParts) -> Phases:
        """What gathering and reducing in every microbatch leave exposed (ZeRO-2 and ZeRO-3)."""
        strategy = self._strategy
        if strategy not in ("optim_grads", "optim_grads_params"):
            return Phases()
        gathered, reduced = self._moves(kind, spec)
        work = times.total
        gpu = self.cluster.gpu
        if strategy == "optim_grads":
            return Phases(0.0, overlapped(gpu, work.dx + work.dw, reduced))
        alone = self.software.gather_rate is not None
        forward = gathered if alone else overlapped(gpu, work.forward, gathered)
        recomputed = self.layout.config.memory.recompute_granularity == "full"
        again = 2 if recomputed and self.software.gathers_to_recompute else 1
        return Phases(forward, overlapped(gpu, work.dx + work.dw, again * gathered + reduced))

    @cached_property
    def hop(self) -> float:
        """Seconds of a message to the next pipeline rank."""
        if self.grid.pp == 1:
            return 0.0
        cluster, parts = self.cluster, self.times.parts
        whole = self.times.hidden_bytes / self.parallel.num_sequence_slices
        if parts < self.grid.tp and self.software.scatters_hops:
            share = send(cluster, self.grid.ranks_per_stage, whole / self.grid.tp)
            return share + gather(cluster, self.times.tp, whole)
        return send(cluster, self.grid.ranks_per_stage, whole / parts)

    @cached_property
    def costs(self) -> Costs:
        """Of the program's acts; a recomputation is part of its backward."""
        totals = [stage.total for stage in self.stages * self.layout.num_copies]
        smallest = 1e-9  # of an empty stage
        waits = self.hop if self.software.waits_for_hops else 0.0
        costs = Costs(
            tuple(max(t.forward, smallest) + waits for t in totals),
            tuple(max(t.dx, smallest) + waits for t in totals),
            tuple(t.dw for t in totals),
            self.hop - waits,
        )
        if not self.layout.overlaps_pairs:
            return costs
        kinds = self.kinds * self.layout.num_copies
        return replace(costs, fb=pair_seconds(self.cluster.gpu, costs, kinds, self._paired))

    def _around(self) -> float:
        """What gathering and reducing once a step leave exposed (no sharding, ZeRO-1)."""
        strategy = self._strategy
        if strategy == "optim_grads_params":
            return 0.0
        worst = 0.0
        for own in self._ranks:
            moves = [self._moves(self.kinds[s], self.layout.split.stages[s]) for s in own]
            gathered, reduced = (sum(column) for column in zip(*moves, strict=True))
            if strategy == "optim_grads":
                reduced = 0.0
            total = sum((self.stages[s].total for s in own), Phases())
            layers = sum(len(self.layout.split.stages[s].layers) for s in own) or 1
            worst = max(
                worst,
                self._exposed(gathered, total.forward, layers, self.parallel.overlap_param_gather)
                + self._exposed(
                    reduced, total.dx + total.dw, layers, self.parallel.overlap_grad_reduce
                ),
            )
        return worst

    def _exposed(self, move: float, work: float, pieces: int, overlaps: bool) -> float:
        """Of a transfer in pieces beside one pass over the layers: the first or last is alone."""
        if not overlaps:
            return move
        alone = move / pieces
        return alone + overlapped(self.cluster.gpu, work, move - alone)

    def _optimizer(self) -> float:
        """AdamW on a rank's shard; before it, the gradients' norm."""
        shard, _, expert = self._data_groups()
        sharded = self.policy.splits_optimizer
        worst, most = 0.0, 0
        for own in self._ranks:
            dense = experts = tensors = 0
            for stage in own:
                for block in stage_blocks(self.layout, self.layout.split.stages[stage]):
                    dense += block.count * sum(map(prod, block.dense))
                    experts += block.count * sum(map(prod, block.experts))
                    tensors += block.count * (len(block.dense) + len(block.experts))
            share = dense / shard.size + experts / expert.size if sharded else dense + experts
            worst, most = max(worst, share), max(most, tensors)
        host = 0.0
        if self.software.by_tensor:
            host = most * _TENSOR_OPERATIONS * self.cluster.host_operation
        here = update_seconds(self.cluster, self.policy, worst)
        return max(here, host) + offload_seconds(self.cluster, self.policy, worst)

    def prediction(self, whole: float, still: float) -> Prediction:
        """From seconds of the program, and of the same with messages that take no time."""
        layout, grid = self.layout, self.grid
        training = layout.config.training
        count = layout.num_microbatches
        each = sum(self.stages, Times()) * (count / grid.pp)
        paired = self.clock.hidden(self.costs) / grid.pp
        busy = each.total.total - paired
        flops = training_flops(layout.config.model, training.seq_length).total
        flops *= training.global_batch_size * training.seq_length
        peak = self.cluster.gpu.peak.of(precision_of(layout))
        ideal = flops / grid.world_size / peak
        around, optimizer = self._around(), self._optimizer()
        jitter = self.cluster.jitter * sqrt(2 * log(grid.world_size)) * whole
        parts = (
            TimePart("ideal", ideal),
            TimePart("kernel efficiency", each.compute.total - ideal),
            TimePart("recompute", each.recompute.total),
            TimePart("offloading", each.offload.total),
            TimePart("bubble", still - busy),
            TimePart("TP communication", each.tp.total),
            TimePart("CP communication", each.cp.total),
            TimePart("EP communication", each.ep.total - paired),
            TimePart("PP communication", whole - still),
            TimePart("DP communication", each.dp.total + around),
            TimePart("optimizer", optimizer),
            TimePart("jitter", jitter),
        )
        step = sum(part.seconds for part in parts)
        notes = tuple(_notes(layout, self.cluster))
        width = _INTERVAL[_kind(layout)] * (1.5 if notes else 1.0)
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


def _kind(layout: Layout) -> str:
    """Which published rows a layout is like."""
    if layout.config.model.num_experts:
        return "experts"
    return "narrow" if precision_of(layout) in ("fp8", "fp4") else "dense"


_TENSOR_OPERATIONS = 15  # of AdamW, the norm and the copies of one tensor
_FITTED = frozenset(
    {"A100-80", "H100", "H100-96", "H800", "H200", "B200", "B300", "GB200", "GB300"}
)
_SEEN_GPUS = 16384  # of the largest published run
_SEEN_SCHEDULES = ("1f1b", "interleaved_1f1b")


def _notes(layout: Layout, cluster: Cluster) -> Iterator[str]:
    """In what a layout lies outside of the published runs that the constants were fitted on."""
    gpu, grid = cluster.gpu, layout.grid
    if GPUS.get(gpu.name) == gpu and gpu.name not in _FITTED:
        yield f"no run on {gpu.name} was fitted: its kernels are taken to be like others"
    if grid.world_size > _SEEN_GPUS:
        yield f"{grid.world_size:,} GPUs are more than the {_SEEN_GPUS:,} of any published run"
    if grid.pp > 1 and layout.schedule not in _SEEN_SCHEDULES:
        yield f"no published run used {layout.schedule}"
    if grid.ep * grid.etp > cluster.gpus_per_node:
        yield "experts are spread over nodes, where published runs differ most"
    if layout.config.training.fp4_format:
        yield "few runs with 4-bit multiplications were published"


@dataclass(frozen=True)
class StageKind:
    """What decides how long a stage takes: its ends, and its layers by (experts, recomputed)."""

    embedding: bool
    head: bool
    mtp: int
    layers: tuple[tuple[tuple[bool, bool], int], ...]
