"""The details of a plan as text, behind its answer (`tell.answer`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf

from fivefold.counts.policy import checkpoint_bytes, saved_bytes
from fivefold.hardware import GB
from fivefold.predict.prediction import Prediction
from fivefold.predict.times.context import configured_ways, context_ways
from fivefold.reliability import (
    DAYS,
    HOURS,
    INTERRUPTIONS_PER_GPU_DAY,
    STORAGE_BANDWIDTH,
    Goodput,
    checkpoint_seconds,
    goodput,
)
from fivefold.search.candidate import Candidate
from fivefold.search.search import SearchResult
from fivefold.tell.columns import prose
from fivefold.tell.describe import summary
from fivefold.tell.explain import alternatives, kept_free, percent, slower
from fivefold.tell.rules import Rule
from fivefold.units import human_bytes, human_count, human_seconds, several, table

CONVENTION = (
    "MFU is model FLOPs (6 per matmul parameter and token with the output layer, causal attention "
    "counted once, none for recomputation) over the peak of the data sheet"
)


NUMBERS = (0, 1, 2, 3, 4)
"""Columns of `ranked` and `traded` that are numbers, as far as they have them."""


def ranked(result: SearchResult, most: int) -> list[tuple[str, ...]]:
    """The best layout of each mesh, the recommended one first, below a row of names."""
    rows: list[tuple[str, ...]] = [("", "step", "", "MFU", "memory", "layout")]
    for number, candidate in enumerate(result.by_mesh()[:most], 1):
        figures = (
            human_seconds(candidate.seconds),
            percent(candidate.seconds / result.best.seconds - 1),
            f"{candidate.predicted.mfu:.1%}",
            human_bytes(candidate.memory.device_total),
        )
        rows.append((f"{number}", *figures, summary(candidate.layout)))
    return rows


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
    if memory.cluster.host_share < inf:
        offloaded += f", of its share of {human_bytes(memory.cluster.host_share)}"
    offloaded += f"; on disk: {human_bytes(disk)}" if (disk := memory.disk) else ""
    notes = [
        f"the fullest is rank {fullest}, at {worst.act} ({worst.phase})",
        f"driver, NCCL and fragmentation take {human_bytes(memory.cluster.reserved_bytes)} more; "
        f"the device has {human_bytes(memory.capacity)}{kept_free(memory, ' (--memory-margin)')}",
        *([offloaded] if host else []),
    ]
    return [*table(rows, right=range(1, len(shown) + 1)), *prose(notes)]


def counts(result: SearchResult) -> str:
    """The extent of the search, and by how much any other layout could be faster."""
    left = f"more than {result.behind:.1%} faster" if result.behind >= 5e-4 else "faster"
    return (
        f"{result.legal:,} legal layouts, {result.too_large:,} of which cannot fit; the memory of "
        f"{result.looked_at:,} was computed in full and {result.timed:,} were simulated. Bounds "
        f"prove that none of the others is {left} ({human_seconds(result.seconds)})"
    )


@dataclass(frozen=True)
class Cost:
    """The cost of a training run.

    Attributes:
        tokens: number of training tokens.
        steps: number of optimizer steps.
        seconds: time of all steps, without interruptions, in seconds.
        gpu_hours: GPU hours of all steps, without interruptions.
        hourly: price of a GPU hour; None: not known.
        goodput: the effect of interruptions; None if the cluster has no failure rate.
    """

    tokens: float
    steps: int
    seconds: float
    gpu_hours: float
    hourly: float | None
    goodput: Goodput | None

    @property
    def longer(self) -> float:
        """The factor by which interruptions lengthen the run; infinite if they never let it end."""
        share = 1.0 if self.goodput is None else self.goodput.share
        return 1 / share if share else inf

    @property
    def wall(self) -> float:
        """Time of the run with interruptions, in seconds."""
        return self.seconds * self.longer

    @property
    def price(self) -> float | None:
        """Price of the run, with interruptions; None if the cluster has no price."""
        return None if self.hourly is None else self.gpu_hours * self.longer * self.hourly


def cost(result: SearchResult, tokens: float | None) -> Cost:
    """The cost of training on this many tokens; None: the tokens of the run.

    Smaller batches, with which a run may begin, are taken to be as fast, token by token.
    """
    candidate, cluster = result.best, result.request.cluster
    config = candidate.layout.config
    training, batch = config.training, config.training.step_tokens
    steps = ceil(tokens / batch) if tokens else training.num_steps
    tokens = steps * batch if tokens else training.samples * training.seq_length
    seconds = tokens / batch * candidate.seconds
    world = result.request.world
    kept = None
    if cluster.interruptions_per_gpu_day:
        kept = goodput(
            world,
            checkpoint_seconds(checkpoint_bytes(config), cluster.nodes),
            device_mtbf=DAYS / cluster.interruptions_per_gpu_day,
        )
    return Cost(
        tokens=tokens,
        steps=steps,
        seconds=seconds,
        gpu_hours=seconds * world / HOURS,
        hourly=cluster.price_per_gpu_hour,
        goodput=kept,
    )


def cost_lines(result: SearchResult, tokens: float | None) -> Iterator[str]:
    """The cost of a run, and its checkpoints."""
    found = cost(result, tokens)
    if tokens:
        yield (
            f"{human_count(found.tokens)} tokens are {several(found.steps, 'step')}: "
            f"{human_seconds(found.seconds)} of training, {found.gpu_hours:,.0f} GPU hours"
        )
    kept, rate = found.goodput, result.request.cluster.interruptions_per_gpu_day
    if kept is None:
        return
    whose = f"the cluster's rate, {rate:g} of a GPU a day"
    if rate == INTERRUPTIONS_PER_GPU_DAY:
        whose = "the rate of Llama 3's 54 days (419 on 16,384 GPUs, 78 % of them hardware)"
    yield f"failures: one every {human_seconds(kept.mtbf)} at {whose}"
    steps, config = max(1, round(kept.interval / result.best.seconds)), result.request.config
    size = "" if config.model.trains_all else f"{human_bytes(checkpoint_bytes(config))}: "
    what = "parameter" if config.model.trains_all else "trained parameter"
    yield (
        f"checkpoints: best every {human_seconds(kept.interval)} ({several(steps, 'step')}), if "
        f"writing one stops training for {human_seconds(kept.checkpoint)} "
        f"({size}{saved_bytes(config):g} bytes a {what}, {STORAGE_BANDWIDTH / GB:g} "
        f"GB/s a node) and a restart takes {human_seconds(kept.restart)}"
    )
    yield f"goodput: {kept.share:.1%} of the time advances the training"
    if tokens and found.wall == inf:
        yield "in all: no end, as the run fails more often than it can save"
    elif tokens:
        price = f", {found.price:,.0f} at the cluster's price" if found.price else ""
        yield (
            f"in all: {human_seconds(found.wall)} of wall-clock time, "
            f"about {several(round(found.wall / kept.mtbf), 'interruption')}{price}"
        )


def others(result: SearchResult) -> list[tuple[str, str]]:
    """The nearest layouts that were not chosen, each with the reason."""
    return [(summary(other.candidate.layout), other.reason) for other in alternatives(result)]


def context(result: SearchResult) -> Iterator[str]:
    """The kinds of context-parallel communication, compared."""
    config, cluster = result.best.layout.config, result.request.cluster
    if result.best.layout.grid.cp == 1:
        return
    chosen, ways = configured_ways(config, cluster), context_ways(config, cluster)
    names = [way.name for way, _ in chosen]
    seconds = sum(way.attention.total * share for way, share in chosen)
    yield (
        f"context parallelism by {' and '.join(names)}; attention itself takes "
        f"{human_seconds(seconds)} per layer and microbatch, forward and backward:"
    )
    rows = [("", "sends", "exposed", "with attention")]
    for way in ways:
        sent = human_bytes(way.sent.forward + way.sent.backward)
        mark = "*" if way.name in names else ""
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


def traded(result: SearchResult) -> list[tuple[str, ...]]:
    """The layouts that trade time for memory, below a row of names."""
    rows: list[tuple[str, ...]] = [("memory", "step", "", "layout")]
    for candidate in result.pareto()[:6]:
        size = human_bytes(candidate.memory.device_total)
        more = percent(candidate.seconds / result.best.seconds - 1)
        rows.append((size, human_seconds(candidate.seconds), more, summary(candidate.layout)))
    return rows


def rules(result: SearchResult, rule: Rule) -> Iterator[str]:
    """The layout that rules of thumb lead to, compared with the best."""
    if rule.candidate is None:
        yield "the rule of thumb finds nothing that fits"
        return
    for step in rule.steps:
        yield f"- {step}"
    yield summary(rule.candidate.layout)
    behind = slower(result.best.predicted, rule.candidate.predicted)
    yield f"step {human_seconds(rule.candidate.seconds)}, {behind}"
