"""Explains a plan: what limits the best layout, the alternatives, and what would change it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fivefold.config.config import SETTINGS
from fivefold.config.flags import ALIASES, scan
from fivefold.errors import ConfigError, Mistakes, did_you_mean
from fivefold.predict.cluster import Cluster, Link
from fivefold.predict.memory.peak import MemoryPrediction
from fivefold.predict.prediction import Prediction
from fivefold.predict.step import predict_all
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.request import FIXABLE, Request
from fivefold.search.search import LESS_MEMORY, NOISE, SearchResult, search
from fivefold.tell.describe import summary
from fivefold.tell.export.targets import export
from fivefold.units import human_bytes, human_seconds

_LAYOUT_SETTINGS = tuple(s for s in SETTINGS.values() if s.name in FIXABLE)
SOME = 8  # layouts that are predicted again for each change of the cluster
ALTERNATIVES = 4  # layouts of other meshes that are shown


def differences(base: Prediction, other: Prediction, most: int = 3) -> list[str]:
    """The parts of the step in which two layouts differ most, the largest difference first."""
    ours = {part.name: part.seconds for part in base.parts}
    theirs = {part.name: part.seconds for part in other.parts}
    changes = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in {**ours, **theirs}}
    least = 0.002 * base.step_time
    large = sorted((n for n in changes if abs(changes[n]) >= least), key=lambda n: -abs(changes[n]))
    return [f"{name} {signed_seconds(changes[name])}" for name in large[:most]]


def signed_seconds(seconds: float) -> str:
    """'+120 ms' or '-1.2 s'."""
    return f"{'-' if seconds < 0 else '+'}{human_seconds(abs(seconds))}"


def shortfall(memory: MemoryPrediction) -> str:
    """By how much a layout exceeds the fullest device, and the largest parts of its memory.

    If only host memory or the disk is too small, by how much.
    """
    worst = memory.worst
    if memory.missing <= 0 < memory.missing_on_host:
        return (
            f"needs {human_bytes(memory.host)} of host memory for each GPU, "
            f"{human_bytes(memory.missing_on_host)} more than its share of "
            f"{human_bytes(memory.cluster.host_share)} (--host-memory)"
        )
    if memory.missing <= 0 < memory.missing_on_disk:
        return (
            f"needs {human_bytes(memory.disk)} of disk for each GPU, "
            f"{human_bytes(memory.missing_on_disk)} more than its share of "
            f"{human_bytes(memory.cluster.disk_share)} (disk_bytes of the cluster)"
        )
    largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
    made_of = ", ".join(f"{name} {human_bytes(size)}" for name, size in largest)
    return (
        f"needs {human_bytes(memory.device_total)} on pipeline rank {worst.pp_rank}, "
        f"{human_bytes(memory.missing)} more than the device has{kept_free(memory)}: {made_of}"
    )


def kept_free(memory: MemoryPrediction, flag: str = "") -> str:
    """The share of a device that a plan leaves free, in words; empty if it is none."""
    margin = memory.cluster.memory_margin
    return f", {100 * margin:.3g} % of it kept free{flag}" if margin else ""


@dataclass(frozen=True)
class Alternative:
    """A layout that was not chosen.

    Attributes:
        candidate: the layout.
        reason: why it was not chosen, in one line.
    """

    candidate: Candidate
    reason: str


def alternatives(result: SearchResult) -> list[Alternative]:
    """The nearest layouts of other meshes: slower ones, and faster ones that do not fit."""
    best = result.best
    found = [
        Alternative(other, slower(best.predicted, other.predicted))
        for other in result.by_mesh()
        if other.mesh != best.mesh
    ]
    faster = [c for c in missed(result) if c.seconds < best.seconds]
    tight = sorted(faster, key=lambda c: c.memory.device_total)[: ALTERNATIVES // 2]
    return [
        *(
            Alternative(c, f"{percent(c.seconds / best.seconds - 1)}, but {shortfall(c.memory)}")
            for c in tight
        ),
        *found[: ALTERNATIVES - len(tight)],
    ]


def slower(best: Prediction, other: Prediction) -> str:
    """By how much another layout is slower or faster, and in which parts of the step."""
    share = percent(other.step_time / best.step_time - 1)
    where = ", ".join(differences(best, other))
    return share + (f": {where}" if where else "")


def percent(share: float) -> str:
    """A signed percentage such as '+1.6%'; '0%' if it is too small to show."""
    return f"{share:+.1%}" if abs(share) >= 5e-4 else "0%"


@dataclass(frozen=True)
class Sensitivity:
    """The effect of a change of the cluster, or of one more technique.

    Attributes:
        change: description of the change.
        seconds: step time of the best layout after the change; infinite if no layout that was
            found fits then.
        candidate: the best layout after the change.
        moves: whether that is another layout than the best without the change.
        untrained: whether Fivefold's own trainer cannot run the changed layout yet.
    """

    change: str
    seconds: float
    candidate: Candidate
    moves: bool
    untrained: bool = False


def sensitivities(result: SearchResult) -> list[Sensitivity]:
    """The effects of changes of the cluster, and of techniques that the search does not try.

    For each changed cluster only layouts that the search has evaluated are compared. The best one
    stays where no other is faster but for noise, as in the search: what another layout gains on the
    cluster as it is, is no gain of the change.
    """
    changes = _changes(result.request.cluster)
    return [*(_under(result, change, cluster) for change, cluster in changes), *_techniques(result)]


def _techniques(result: SearchResult) -> Iterator[Sensitivity]:
    """The effects of single settings that were not given, if they change the step time."""
    best, given, cluster = result.best, result.request.given, result.request.cluster
    tried: list[tuple[str, dict[str, Any]]] = [
        ("--tp-comm-overlap", {"tp_comm_overlap": True}),
        ("--moe-token-dispatcher-type alltoall", {"moe_token_dispatcher_type": "alltoall"}),
    ]
    missing = export(best.layout, "fivefold").missing
    if cluster.gpu.multiplies_in("fp8") and best.layout.config.product_precision == "bf16":
        narrow = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
        tried.append(("--fp8-format hybrid --fp8-recipe tensorwise", narrow))
    for change, settings in tried:
        config = best.layout.config.with_values(**settings)
        if given & set(settings) or config == best.layout.config:
            continue
        try:
            layout = result.request.checked(config)
            candidate = evaluate(result.request, layout, always=True)
        except ConfigError:
            continue
        if candidate.memory.fits and abs(candidate.seconds / best.seconds - 1) >= 1e-3:
            lacks = set(export(candidate.layout, "fivefold").missing) - set(missing)
            yield Sensitivity(change, candidate.seconds, candidate, False, bool(lacks))


def _changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    gpu = cluster.gpu

    def faster(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * 1.1)

    if cluster.nodes > 1:
        network = faster(cluster.network_link)
        yield "network between nodes +10 %", replace(cluster, network_link=network)
    if cluster.num_gpus > 1:
        yield "links inside nodes +10 %", replace(cluster, node_link=faster(cluster.node_link))
    rates = replace(gpu, sustained=gpu.sustained * 1.1)
    yield "multiplications +10 %", replace(cluster, gpu=rates)
    memory = replace(gpu, memory_bandwidth=gpu.memory_bandwidth * 1.1)
    yield "memory bandwidth +10 %", replace(cluster, gpu=memory)
    for change, size in (("+10 GB", LESS_MEMORY), ("-10 GB", -LESS_MEMORY)):
        changed = replace(cluster, gpu=replace(gpu, memory_bytes=gpu.memory_bytes + size))
        if changed.room > 0:
            yield f"device memory {change}", changed


def _under(result: SearchResult, change: str, cluster: Cluster) -> Sensitivity:
    best, before = result.best, result.request.cluster
    here = [*result.by_mesh()[:SOME], *result.found[:SOME], best]
    if cluster.gpu.memory_bytes > before.gpu.memory_bytes:
        faster = sorted(
            (c for c in result.rejected if c.bound < best.seconds), key=lambda c: c.bound
        )
        here += faster[: 2 * SOME]
    elif cluster.gpu.memory_bytes < before.gpu.memory_bytes:
        here = list(result.found)
    here = [*{id(candidate): candidate for candidate in here}.values()]
    sized = [replace(c, memory=replace(c.memory, cluster=cluster)) for c in here]
    looked = _timed([c for c in sized if c.memory.fits], cluster, before)
    if not looked:
        return Sensitivity(change, inf, best, False)
    fastest = min(looked, key=lambda c: c.seconds)
    unmoved = [c for c in looked if c.layout is best.layout]
    if unmoved and unmoved[0].seconds <= fastest.seconds * (1 + NOISE):
        fastest = unmoved[0]
    return Sensitivity(change, fastest.seconds, fastest, fastest.layout is not best.layout)


def _timed(candidates: list[Candidate], cluster: Cluster, before: Cluster) -> list[Candidate]:
    """The candidates with their times on a cluster that was `before`; memory changes none."""
    gpu = replace(cluster.gpu, memory_bytes=before.gpu.memory_bytes)
    larger = replace(cluster, gpu=gpu) == before
    known = [c.prediction is not None and larger for c in candidates]
    new = [c.layout for c, is_known in zip(candidates, known, strict=True) if not is_known]
    predictions = iter(predict_all(new, cluster, times_cache={}))
    return [
        replace(
            c, prediction=replace(c.predicted, cluster=cluster) if is_known else next(predictions)
        )
        for c, is_known in zip(candidates, known, strict=True)
    ]


def binding(result: SearchResult) -> str:
    """What limits the best layout most, as a sentence."""
    limited = limit(result)
    if limited is None:
        return f"{largest_loss(result)}; more device memory would not allow a faster layout"
    return f"{limited}; {largest_loss(result)}"


def largest_loss(result: SearchResult) -> str:
    """The part of the step that costs the most time beyond the ideal."""
    largest = max(result.best.predicted.losses, key=lambda part: part.seconds)
    share = largest.seconds / result.best.seconds
    return f"the largest loss of time is {largest.name}, {share:.0%} of the step"


def limit(result: SearchResult) -> str | None:
    """How much more device memory would allow a faster layout than any that fits; None if none."""
    best = result.best
    faster = [c for c in missed(result) if c.seconds < result.fastest * 0.99]
    if not faster:
        return None
    small = min(faster, key=lambda c: c.memory.device_total)
    return (
        f"device memory: with {human_bytes(small.memory.missing)} more, "
        f"{summary(small.layout)} would be {1 - small.seconds / best.seconds:.1%} faster"
    )


def missed(result: SearchResult) -> list[Candidate]:
    """Layouts too large for a device and faster than the best: the smallest and the fastest."""
    large = [c for c in result.rejected if c.memory.missing > 0]
    faster = [c for c in large if c.bound < result.best.seconds]
    nearest = sorted(faster, key=lambda c: c.memory.device_total)[:SOME]
    promising = sorted(faster, key=lambda c: c.bound)[:SOME]
    return list({id(candidate): candidate for candidate in (*nearest, *promising)}.values())


def changed(request: Request, text: str) -> Request:
    """The request with settings that a text such as "tp=4 pp=8" fixes.

    Raises:
        ConfigError: the text has words that are not layout settings, or wrong values.
    """
    mistakes, argv = Mistakes(), []
    for part in text.split():
        name, has_value, value = part.partition("=")
        dashed = name if name.startswith("-") else f"--{name}"
        if _names_a_setting(dashed):
            argv += [dashed, *(value.split(",") if has_value else ())]
        else:
            known = [*ALIASES, *sorted(FIXABLE)]
            close = did_you_mean(name.lstrip("-").replace("-", "_"), known)
            what = f"--why {part}: {name!r} is no layout setting{close}"
            mistakes.add(what, works=("--why 'tp=4 pp=8'",))
    given = scan(argv, _LAYOUT_SETTINGS, mistakes)
    for word in given.words:
        mistakes.add(f"--why takes settings such as tp=4 pp=8, not {word!r}")
    if not (given.values or given.words or mistakes.found):
        mistakes.add("--why takes settings such as tp=4 pp=8, and there are none")
    mistakes.raise_if_any()
    return request.but(**given.values)


def best_with(result: SearchResult, other: Request) -> SearchResult:
    """The result of a search with further settings; the given result if its best layout has
    them."""
    config, known = result.best.layout.config, result.request.fixed().items()
    if all(each in known or config.value(each[0]) == each[1] for each in other.fixed().items()):
        return result
    return search(other)


def _names_a_setting(flag: str) -> bool:
    """Whether a word that begins with dashes is a layout setting, or turns one off."""
    name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
    name = ALIASES.get(name, name)
    switches = {s.name for s in _LAYOUT_SETTINGS if s.kind is bool}
    return name in FIXABLE or name.removeprefix("no_") in switches
