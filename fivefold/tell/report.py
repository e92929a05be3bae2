"""The report of a plan as text."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf
from textwrap import wrap

from fivefold.counts.policy import saved_bytes
from fivefold.model.shape import count_parameters
from fivefold.predict.context import configured_way, context_ways
from fivefold.predict.prediction import Prediction, precision_of
from fivefold.reliability import DAYS, HOURS, Goodput, checkpoint_seconds, goodput
from fivefold.search.candidate import Candidate
from fivefold.search.proven import PROVEN
from fivefold.search.search import NOISE, SearchResult
from fivefold.tell.columns import WIDTH, listed, prose, table
from fivefold.tell.degrees import expert_degrees
from fivefold.tell.describe import context_words, machines, memory_words, requirements, summary
from fivefold.tell.effects import effects
from fivefold.tell.explain import (
    alternatives,
    binding,
    kept_free,
    shortfall,
    slower,
)
from fivefold.tell.export.targets import export
from fivefold.tell.infeasible import why_nothing
from fivefold.tell.rules import Rule
from fivefold.units import human_bytes, human_count, human_flops, human_seconds

CONVENTION = (
    "MFU is model FLOPs (6 per matmul parameter and token with the output layer, causal attention "
    "counted once, none for recomputation) over the peak of the data sheet"
)


def ranked(result: SearchResult, most: int) -> list[str]:
    """A table of the best layout of each mesh, the recommended one first."""
    candidates = result.by_mesh()[:most]
    head = ("", "tp", "cp", "pp", "ep", "dp", "mbs", "schedule", "shards", "memory saved by")
    rows = [(*head, "memory", "step", "MFU", "tokens/s/GPU")]
    for number, candidate in enumerate(candidates, 1):
        layout, grid = candidate.layout, candidate.layout.grid
        prediction = candidate.prediction
        assert prediction is not None
        parallel = layout.config.parallel
        virtual = layout.split.num_virtual
        plain = grid.pp == 1 and not layout.runs_pairs
        schedule = "-" if plain else layout.schedule + f" x{virtual}" * (virtual > 1)
        copies = parallel.num_distributed_optimizer_instances
        shards = parallel.sharding.paper_name + (f" /{copies}" * (copies > 1))
        expert = f"{grid.ep}" + (f"x{grid.etp}" * (grid.etp > 1))
        rows.append(
            (
                f"{number}",
                f"{grid.tp}",
                f"{grid.cp}" + (f" {context_words(layout)}" if grid.cp > 1 else ""),
                f"{grid.pp}",
                expert,
                f"{grid.dp}",
                f"{layout.config.training.micro_batch_size}",
                schedule,
                shards,
                ", ".join(memory_words(layout)) or "-",
                human_bytes(candidate.memory.device_total),
                human_seconds(prediction.step_time),
                f"{prediction.mfu:.1%}",
                f"{prediction.tokens_per_second_per_gpu:,.0f}",
            )
        )
    return table(rows, right=(0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13))


def waterfall(prediction: Prediction) -> list[str]:
    """A table of the parts of the step time, from the ideal time on."""
    total = prediction.step_time
    rows = [("", "seconds", "share", "")]
    for part in prediction.parts:
        if abs(part.seconds) >= 5e-4 * total:
            bar = "#" * round(40 * abs(part.seconds) / total)
            rows.append(
                (part.name, human_seconds(part.seconds), f"{part.seconds / total:.1%}", bar)
            )
    rows.append(("step", human_seconds(total), "100.0%", ""))
    return table(rows, right=(1, 2))


def memory_table(candidate: Candidate) -> list[str]:
    """A table of the parts of peak memory: of all ranks, or the first, last and fullest."""
    memory, ranks = candidate.memory, candidate.memory.ranks
    fullest = memory.worst.pp_rank
    shown = sorted({0, fullest, len(ranks) - 1} | set(range(len(ranks)) if len(ranks) <= 8 else ()))
    names = list(dict.fromkeys(name for rank in shown for name in ranks[rank].parts))
    rows = [("rank", *(str(rank) + "*" * (rank == fullest) for rank in shown))]
    for name in names:
        sizes = (human_bytes(ranks[rank].parts.get(name, 0.0)) for rank in shown)
        rows.append((name, *sizes))
    rows.append(("peak", *(human_bytes(ranks[rank].peak) for rank in shown)))
    worst, host = memory.worst, memory.host
    offloaded = f"in host memory: at most {human_bytes(host)} per GPU"
    if memory.host_capacity < inf:
        offloaded += f", of its share of {human_bytes(memory.host_capacity)}"
    offloaded += f"; on disk: {human_bytes(disk)}" if (disk := memory.disk) else ""
    notes = [
        f"the fullest is rank {fullest}, at {worst.act} ({worst.phase})",
        f"driver, NCCL and fragmentation take {human_bytes(memory.reserved)} more; the device has "
        f"{human_bytes(memory.capacity)}{kept_free(memory, ' (--memory-margin)')}",
        *([offloaded] if host else []),
    ]
    return [*table(rows, right=range(1, len(shown) + 1)), *prose(notes)]


def counts(result: SearchResult) -> str:
    """The extent of the search, and by how much any other layout could be faster."""
    left = f"more than {result.gap:.1%} faster" if result.gap >= 5e-4 else "faster"
    return (
        f"{result.legal:,} legal layouts, {result.too_large:,} of which cannot fit; the memory of "
        f"{result.looked_at:,} was computed in full and {result.timed:,} were simulated. Bounds "
        f"prove that none of the others is {left} ({human_seconds(result.seconds)})"
    )


def parameters(result: SearchResult) -> int:
    """The number of parameters of the whole model."""
    return count_parameters(result.request.config.model).total


def question(result: SearchResult) -> Iterator[str]:
    """The request: model, cluster, batch, and assumed and fixed settings."""
    request = result.request
    model, training, cluster = request.config.model, request.config.training, request.cluster
    whole = parameters(result)
    active = count_parameters(model, active=True).total
    of_them = "" if active == whole else f", {human_count(active)} of them active"
    yield f"model      {human_count(whole)} parameters{of_them}, {model.num_layers} layers"
    yield f"cluster    {machines(cluster)}"
    tokens = training.global_batch_size * training.seq_length
    yield (
        f"step       {training.global_batch_size:,} sequences of {training.seq_length:,} tokens = "
        f"{human_count(tokens)} tokens, {training.precision}"
        + (f" with {training.fp8_format} fp8" if training.fp8_format else "")
    )
    for what in request.assumed:
        yield f"assumed    {what}"
    for name, value in sorted(request.fixed().items()):
        yield f"fixed      {name} = {value}"
    if request.only == PROVEN:
        yield "proven     only schedules and techniques that published runs have used (--proven)"


def best(result: SearchResult) -> Iterator[str]:
    """The recommended layout and its time."""
    candidate = result.best
    prediction = candidate.prediction
    assert prediction is not None
    gpus = candidate.layout.grid.world_size
    yield f"{summary(candidate.layout)}"
    yield (
        f"step {human_seconds(prediction.step_time)} "
        f"(80 % between {human_seconds(prediction.low)} and {human_seconds(prediction.high)}), "
        f"{prediction.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, "
        f"{human_flops(prediction.model_flops / prediction.step_time / gpus)}/s a GPU = "
        f"{prediction.mfu:.1%} of the {precision_of(candidate.layout)} peak"
    )
    yield CONVENTION
    yield from _tied(result)
    untrained = export(candidate.layout, "fivefold").missing
    for note in (*prediction.notes, *requirements(candidate.layout), *untrained):
        yield f"note: {note}"


def _tied(result: SearchResult) -> Iterator[str]:
    """Why this layout, if others are as fast."""
    others = result.ties()
    if others:
        count = "one other mesh is" if len(others) == 1 else f"{len(others)} other meshes are"
        yield (
            f"{count} predicted within {NOISE:.0%} of the fastest, less than runs of one layout "
            "differ; of these it has most memory left, settings that published runs had, and the "
            "fewest techniques, in this order"
        )


@dataclass(frozen=True)
class Cost:
    """The cost of a training run.

    Attributes:
        tokens: number of training tokens.
        steps: number of optimizer steps.
        seconds: time of all steps, without interruptions, in seconds.
        gpu_hours: GPU hours of all steps, without interruptions.
        price: price of the run, with interruptions; None if the cluster has no price.
        goodput: the effect of interruptions; None if the cluster has no failure rate.
    """

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float
    price: float | None
    goodput: Goodput | None

    @property
    def wall(self) -> float:
        """Time of the run with interruptions, in seconds."""
        return self.seconds / self.goodput.share if self.goodput else self.seconds


def cost(result: SearchResult, tokens: float | None) -> Cost:
    """The cost of training on this many tokens; None: the tokens of `train_iters` steps."""
    candidate, cluster = result.best, result.request.cluster
    config = candidate.layout.config
    batch = config.training.global_batch_size * config.training.seq_length
    steps = ceil(tokens / batch) if tokens else config.training.train_iters
    seconds = steps * candidate.seconds
    world = result.request.world
    kept = None
    if cluster.interruptions_per_gpu_day:
        kept = goodput(
            world,
            checkpoint_seconds(parameters(result) * saved_bytes(config), cluster.nodes),
            device_mtbf=DAYS / cluster.interruptions_per_gpu_day,
        )
    wall = seconds / kept.share if kept else seconds
    hourly = cluster.price_per_gpu_hour
    return Cost(
        tokens=steps * batch,
        steps=steps,
        seconds=seconds,
        gpu_hours=seconds * world / HOURS,
        price=None if hourly is None else wall * world / HOURS * hourly,
        goodput=kept,
    )


def cost_lines(result: SearchResult, tokens: float | None) -> Iterator[str]:
    """The cost of a run, and its checkpoints."""
    found = cost(result, tokens)
    if tokens:
        yield (
            f"{human_count(found.tokens)} tokens are {found.steps:,} steps: "
            f"{human_seconds(found.seconds)} of training, {found.gpu_hours:,.0f} GPU hours"
        )
    kept = found.goodput
    if kept is None:
        return
    interruptions = found.wall / kept.mtbf
    yield (
        f"failures: one every {human_seconds(kept.mtbf)} at the rate of Llama 3's 54 days "
        f"(419 on 16,384 GPUs, 78 % of them hardware)"
    )
    yield (
        f"checkpoints: best every {human_seconds(kept.interval)} "
        f"({max(1, round(kept.interval / result.best.seconds)):,} steps), if writing one stops "
        f"training for {human_seconds(kept.checkpoint)} "
        f"({saved_bytes(result.request.config):g} bytes a parameter, 1 GB/s a node) and "
        f"a restart takes {human_seconds(kept.restart)}"
    )
    yield f"goodput: {kept.share:.1%} of the time advances the training"
    if tokens:
        price = f", {found.price:,.0f} at the cluster's price" if found.price else ""
        yield (
            f"in all: {human_seconds(found.wall)} of wall-clock time, "
            f"about {interruptions:,.0f} interruptions{price}"
        )


def explained(result: SearchResult) -> Iterator[str]:
    """What limits the layout, the alternatives, and the effects of changes."""
    yield from wrap(f"limits: {binding(result)}", WIDTH)
    yield from prose(expert_degrees(result))
    yield from context(result)
    yield ""
    for other in alternatives(result):
        yield from wrap(f"not {summary(other.candidate.layout)}:", WIDTH)
        indent = " " * 4
        yield from wrap(other.reason, WIDTH, initial_indent=indent, subsequent_indent=indent)
    yield ""
    yield from effects(result)


def context(result: SearchResult) -> Iterator[str]:
    """The kinds of context-parallel communication, compared."""
    config, cluster = result.best.layout.config, result.request.cluster
    if result.best.layout.grid.cp == 1:
        return
    chosen = configured_way(config, cluster)
    ways = context_ways(config, cluster)
    yield (
        f"context parallelism by {chosen.name}; attention itself takes "
        f"{human_seconds(chosen.attention.total)} per layer and microbatch, forward and backward:"
    )
    rows = [("", "sends", "exposed", "with attention")]
    for way in ways:
        sent = human_bytes(way.sent.forward + way.sent.backward)
        mark = "*" if way.name == chosen.name else ""
        rows.append(
            (
                way.name + mark,
                sent,
                human_seconds(way.exposed.total),
                human_seconds(way.seconds),
            )
        )
    yield from table(rows, right=(1, 2, 3))
    own = config.training.seq_length // result.best.layout.grid.cp
    ring = next((way for way in ways if way.kind == "p2p"), None)
    if ring is not None:
        yield (
            f"a ring hides its communication from {ring.tokens:,.0f} tokens per rank up "
            f"(2 k/a F/B); this layout has {own:,}"
        )


def pareto(result: SearchResult) -> list[str]:
    """A table of the layouts that trade time for memory."""
    front = result.pareto()[:6]
    rows = [("memory", "step", "")]
    for candidate in front:
        size = human_bytes(candidate.memory.device_total)
        rows.append((size, human_seconds(candidate.seconds), summary(candidate.layout)))
    return list(listed(rows, right=(0, 1)))


def why(result: SearchResult, other: SearchResult, text: str) -> Iterator[str]:
    """The best layout with some settings fixed, compared with the best of all."""
    best = result.best.prediction
    assert best is not None
    if other.found:
        prediction = other.best.prediction
        assert prediction is not None
        yield f"with {text}: {summary(other.best.layout)}"
        if other.best.layout.config == result.best.layout.config:
            yield "that is the best layout"
            return
        yield (
            f"step {human_seconds(other.best.seconds)} instead of "
            f"{human_seconds(result.best.seconds)}, {slower(best, prediction)}"
        )
        used = other.best.memory.device_total - result.best.memory.device_total
        sign = "more" if used >= 0 else "less"
        yield f"memory {human_bytes(abs(used))} {sign} on the fullest GPU"
        return
    nearest = min(other.rejected, key=lambda c: c.memory.device_total, default=None)
    if nearest is None:
        yield f"with {text}: {why_nothing(other)}"
        return
    yield f"with {text} nothing fits; nearest: {summary(nearest.layout)}"
    yield shortfall(nearest.memory)


def rules(result: SearchResult, rule: Rule) -> Iterator[str]:
    """The layout that rules of thumb lead to, compared with the best."""
    if rule.candidate is None or rule.candidate.prediction is None:
        yield "the rule of thumb finds nothing that fits"
        return
    best = result.best.prediction
    assert best is not None
    for step in rule.steps:
        yield f"- {step}"
    yield f"{summary(rule.candidate.layout)}"
    yield (
        f"step {human_seconds(rule.candidate.seconds)}, {slower(best, rule.candidate.prediction)}"
    )
