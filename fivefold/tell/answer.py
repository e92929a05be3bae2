"""A plan in short: the layout, whether it fits, its time, why, and what to type next."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from fivefold.description.shape import count_parameters
from fivefold.predict.cluster import LARGEST_HOST
from fivefold.predict.prediction import Prediction
from fivefold.search.proven import PROVEN
from fivefold.search.search import NOISE, SearchResult
from fivefold.tell.columns import listed
from fivefold.tell.degrees import expert_degrees
from fivefold.tell.describe import machines, requirements, summary
from fivefold.tell.explain import (
    Sensitivity,
    alternatives,
    kept_free,
    largest_loss,
    limit,
    percent,
    shortfall,
    slower,
)
from fivefold.tell.export.targets import export
from fivefold.tell.infeasible import why_nothing
from fivefold.units import human_bytes, human_count, human_flops, human_seconds, several

RACK_HOST = 4
"""GPUs of a host in a rack that is one NVLink domain (GB200 NVL72)."""
_GAIN = 0.01  # least share of a step that a change must save to be among the reasons
_WITH_VALUE = ("--html", "--top", "--train-tokens")
_ONLY_HERE = ("--verbose", "--no-verbose", "--rules", "--guide", *_WITH_VALUE)


def title(result: SearchResult, model: str) -> str:
    """The model by its name, its size, and the GPUs, such as 'gpt2 (124 M parameters) on 8 x H100'.

    Args:
        result: what the search found.
        model: the name of the model: a preset, a recipe, a hub name, or a path.
    """
    shape, cluster = result.request.config.model, result.request.cluster
    whole = count_parameters(shape).total
    active = count_parameters(shape, active=True).total
    of_them = "" if active == whole else f", {human_count(active)} of them active"
    gpus = f"{result.request.world:,} x {cluster.gpu.name}"
    return f"{model} ({human_count(whole)} parameters{of_them}) on {gpus}"


def answer(result: SearchResult) -> list[tuple[str, str]]:
    """The best layout, its time and memory, and what was asked and assumed, each with its name."""
    candidate, request = result.best, result.request
    training = request.config.training
    tokens = training.step_tokens
    fp8 = f" with {training.fp8_format} fp8" if training.fp8_format else ""
    if (model := request.config.model).first_last_layers_bf16:
        first, last = model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
        fp8 += f" between {first} + {last} layers without"
    rows = [
        ("layout", summary(candidate.layout)),
        ("step", _speed(candidate.predicted)),
        ("memory", _fits(result)),
        (
            "batch",
            f"{several(training.global_batch_size, 'sequence')} of "
            f"{several(training.seq_length, 'token')} = "
            f"{human_count(tokens)} tokens, {training.precision}{fp8}",
        ),
        ("cluster", machines(request.cluster)),
    ]
    rows += [("tied", words) for words in _tied(result)]
    rows += [("assumed", what) for what in request.assumed]
    rows += [("fixed", words) for words in sorted(request.fixed_words())]
    if request.only == PROVEN:
        rows.append(("proven", "only what published runs have used (--proven)"))
    untrained = export(candidate.layout, "fivefold").missing
    notes = (*candidate.predicted.notes, *requirements(candidate.layout), *untrained)
    return rows + [("note", note) for note in notes]


def _tied(result: SearchResult) -> Iterator[str]:
    """Why this layout was chosen, if others are as fast."""
    others = result.ties()
    if others:
        count = "one other mesh is" if len(others) == 1 else f"{len(others)} other meshes are"
        yield (
            f"{count} predicted within {NOISE:.0%} of the fastest, less than runs of one layout "
            "differ; of these it has most memory left, settings that published runs had, and the "
            "fewest techniques, in this order"
        )


def _speed(made: Prediction) -> str:
    gpus = made.layout.grid.world_size
    return (
        f"{human_seconds(made.step_time)} (80 % between {human_seconds(made.low)} and "
        f"{human_seconds(made.high)}), {made.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, "
        f"{human_flops(made.model_flops / made.step_time / gpus)}/s a GPU = {made.mfu:.1%} of the "
        f"{made.layout.config.product_precision} peak (MFU)"
    )


def _fits(result: SearchResult) -> str:
    memory = result.best.memory
    text = (
        f"fits: {human_bytes(memory.device_total)} of {human_bytes(memory.capacity)} on the "
        f"fullest GPU{kept_free(memory, ' (--memory-margin)')}"
    )
    if memory.host:
        text += f"; {human_bytes(memory.host)} of host memory for each GPU"
    return text + (f"; {human_bytes(memory.disk)} of disk" if memory.disk else "")


def reasons(result: SearchResult, changes: Sequence[Sensitivity]) -> list[tuple[str, str]]:
    """Why it is this layout: its limit, the cost of alternatives, and what would make it faster.

    Args:
        result: what the search found.
        changes: the effects of changes of the cluster and of further techniques.
    """
    best = result.best
    shares = [(part.name, part.seconds / best.seconds) for part in best.predicted.losses]
    shares = sorted((each for each in shares if each[1] >= 0.005), key=lambda each: -each[1])
    spent = ", ".join(f"{name} {share:.1%}" for name, share in shares)
    rows = [("spent", f"{spent} of the step" if spent else largest_loss(result))]
    rows.append(("limit", limit(result) or "more device memory would allow no faster layout"))
    for other in [each for each in alternatives(result) if each.candidate.memory.fits][:1]:
        rows.append(("instead", f"{summary(other.candidate.layout)}: {other.reason}"))
    rows += [("experts", line) for line in expert_degrees(result)]
    gains = [
        each
        for each in changes
        if each.seconds < (result.fastest if each.moves else best.seconds) * (1 - _GAIN)
    ]
    if gains:
        words = sorted(gains, key=lambda each: each.seconds)
        faster = (f"{each.change} {percent(each.seconds / best.seconds - 1)}" for each in words)
        rows.append(("faster", "with " + "; ".join(faster)))
    gap = f"by more than {result.behind:.1%}" if result.behind >= 5e-4 else "at all"
    rows.append(
        (
            "proof",
            f"none of {result.legal:,} legal layouts is faster {gap}, by bounds and "
            f"{result.timed:,} simulations ({human_seconds(result.seconds)})",
        )
    )
    return rows


def why(result: SearchResult, other: SearchResult, text: str) -> Iterator[str]:
    """The best layout with some settings, compared with the best of all.

    Args:
        result: what the search found.
        other: what a search with these settings found.
        text: the settings, as they were asked for.
    """
    best = result.best.predicted
    if not other.found:
        nearest = min(other.rejected, key=lambda c: c.memory.device_total, default=None)
        if nearest is None:
            yield f"{text}: {why_nothing(other)}"
            return
        yield f"{text}: nothing fits"
        rows = [("nearest", summary(nearest.layout)), ("memory", shortfall(nearest.memory))]
        yield from listed([*rows, ("best", summary(result.best.layout))])
        return
    if other.best.layout.config == result.best.layout.config:
        yield f"{text}: that is the best layout"
        yield from listed([("layout", summary(result.best.layout))])
        return
    seconds = f"{human_seconds(other.best.seconds)} a step, {human_seconds(best.step_time)} at best"
    share, _, where = slower(best, other.best.predicted).partition(": ")
    yield f"{text}: {share}, {seconds}"
    used = other.best.memory.device_total
    more = used - result.best.memory.device_total
    rows = [
        ("layout", summary(other.best.layout)),
        ("time", where or "no part of the step differs much"),
        (
            "memory",
            f"{human_bytes(used)} on the fullest GPU, {human_bytes(abs(more))} "
            f"{'more' if more >= 0 else 'less'}",
        ),
        ("best", summary(result.best.layout)),
    ]
    yield from listed(rows)


def next_commands(result: SearchResult, model: str, argv: Sequence[str]) -> Iterator[str]:
    """The commands that write the best layout as a recipe and run it, and those that explain more.

    Args:
        result: what the search found.
        model: the name of the model.
        argv: the words of this command after `fivefold plan`.
    """
    cluster, world = result.request.cluster, result.request.world
    path = Path(model)
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".toml")
    name = re.sub(r"[^\w.-]+", "-", name.lower())
    recipe = f"{name}-{world}.toml"
    asked = " ".join(["fivefold plan", shlex.join(_question(argv))])
    run = f"fivefold train {recipe} --nproc {world}"
    each = min(cluster.gpus_per_node, world)
    if cluster.is_rack and world > LARGEST_HOST:
        each = RACK_HOST
    if world > each and world % each:
        run += " --dry-run"
    elif world > each:
        run = f"fivefold launch slurm {recipe} --nodes {world // each} --ranks-per-node {each}"
    yield f"{asked} --emit fivefold > {recipe}"
    yield run
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    yield from (
        f"{asked} {more}"
        for more in ("--verbose", f"--html {name}.html")
        if more.split()[0] not in given
    )


def _question(argv: Sequence[str]) -> list[str]:
    """The words of the command without flags, and their values, that only choose the output."""
    kept, skips = [], False
    for word in argv:
        flag, has_value, _ = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in _ONLY_HERE:
            skips = not has_value and flag in _WITH_VALUE
        elif not skips:
            kept.append(word)
        else:
            skips = False
    return kept
