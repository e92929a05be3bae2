"""Explains why no layout fits or is legal, and suggests flags that help.

Every suggestion has been tried: added to the same command line, it leads to a layout that fits.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice, product
from math import prod
from typing import Any

from fivefold.config.config import SETTINGS, Config
from fivefold.config.divisors import divisors
from fivefold.config.flags import ALIASES, scan
from fivefold.counts.policy import engine_policy
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.mesh.degrees import DEGREES
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.predict.data_parallel.update import faster_on_device
from fivefold.predict.times.context import legal_ways
from fivefold.search.candidate import Candidate
from fivefold.search.request import Request
from fivefold.search.search import (
    SearchResult,
    fitting_layouts,
    has_plan,
    search,
    smallest_layouts,
)
from fivefold.search.space import FIELDS
from fivefold.tell.describe import summary
from fivefold.tell.explain import shortfall
from fivefold.units import human_bytes, human_seconds, several

GROWTH = (2, 4, 8, 16, 32, 64)  # multiples of the GPUs to try if nothing fits
SUGGESTIONS = 4
COMPLETIONS = 200  # configurations to check when searching for the one that is nearest to legal
Change = dict[str, Any]
"""Values of further flags, by the name of the setting or "num_gpus"."""
ON_HOST: Change = {"optimizer_cpu_offload": True}
VISITING: Change = {"offload_optimizer_states": True}
AWAY: Change = {
    "param_cpu_offload": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
}
ON_DISK: Change = {"optimizer_offload_path": "offloaded"}


def why_nothing(result: SearchResult) -> ConfigError:
    """The error to raise if no layout fits, or none is legal."""
    request = result.request
    rules: tuple[Mistake, ...] = ()
    if result.legal:
        what = f"no layout of this model fits on {request.world:,} x {request.cluster.gpu.name}"
        why = list(_needs(result))
    else:
        what = f"no layout of this model is legal on {several(request.world, 'GPU')}"
        rules = nearest_to_legal(request)
        why = [line for rule in rules for line in (rule.what, *(f"  {each}" for each in rule.why))]
    if fixed := request.fixed_words():
        why.append(f"fixed: {', '.join(fixed)}")
    works = tuple(islice(_works(request, rules, legal=bool(result.legal)), SUGGESTIONS))
    for change in _on_host_ways(request):
        if _typed(change) in works:
            why.append(_on_host(_typed(change), search(request.but(**change))))
            break
    return ConfigError(Mistake(what, tuple(why), works))


def _on_host_ways(request: Request) -> Iterator[Change]:
    """Ways to move the optimizer off the device, which the search does not try by itself.

    First it is updated where that is faster on this machine, on the host or on the device, then on
    the other one. On one rank also with ZeRO-3, which the search does not try there and which keeps
    no second copy of the weights. Slower ways follow if none of these fits: weights off the device,
    too, and a disk.
    """
    extra: list[Change] = [{}]
    if request.world == 1 and "data_parallel_sharding_strategy" not in request.given:
        extra.append({"data_parallel_sharding_strategy": "optim_grads_params"})
    places = [ON_HOST, VISITING]
    if faster_on_device(request.cluster, engine_policy(request.config)):
        places.reverse()
    for place in places:
        in_memory = [place | more for more in extra]
        yield from in_memory
        if any(_has_plan(request, change) for change in in_memory):
            return
    if not {*AWAY} & {*request.given}:
        yield places[0] | AWAY
    if "optimizer_offload_path" not in request.given:
        yield from (places[0] | ON_DISK | more for more in extra)


def _on_host(flags: str, result: SearchResult) -> str:
    """The layout that an optimizer off the device would make fit, and how slow it is."""
    best = result.best
    waits = next(part for part in best.predicted.parts if part.name == "offloading")
    disk = f", and {human_bytes(best.memory.disk)} of disk" if best.memory.disk else ""
    return (
        f"with {flags}: {summary(best.layout)}, "
        f"{human_seconds(best.seconds)} a step ({best.predicted.mfu:.1%} MFU), "
        f"{waits.seconds / best.seconds:.0%} of it for the host, "
        f"{human_bytes(best.memory.device_total)} of each GPU and "
        f"{human_bytes(best.memory.host)} of host memory for it{disk}"
    )


def _needs(result: SearchResult) -> Iterator[str]:
    """The memory that the smallest layouts need, and the available memory."""
    request = result.request
    candidates = [*result.rejected, *smallest_layouts(request)]
    nearest = min(candidates, key=lambda candidate: candidate.memory.shortage)
    room = f"{human_bytes(request.cluster.room)} available on one {request.cluster.gpu.name}"
    if result.smallest > request.cluster.room:
        yield (
            f"{result.legal:,} layouts are legal; the smallest needs at least "
            f"{human_bytes(result.smallest)}, more than the {room}"
        )
    else:
        yield (
            f"{result.legal:,} layouts are legal; none of the {len(candidates):,} that were "
            f"evaluated fits into the {room}"
        )
    yield f"nearest: {summary(nearest.layout)}"
    yield shortfall(nearest.memory)


def nearest_to_legal(request: Request) -> tuple[Mistake, ...]:
    """The rules that the layout closest to legal breaks, among those with the given settings."""
    fewest: tuple[Mistake, ...] | None = None
    for config in islice(_completions(request), COMPLETIONS):
        try:
            request.checked(config)
        except ConfigError as error:
            if fewest is None or len(error.mistakes) < len(fewest):
                fewest = error.mistakes
        else:
            return ()
    assert fewest is not None
    return fewest


def _completions(request: Request) -> Iterator[Config]:
    """Configurations with the given settings and usual values of the others, plain ones first."""
    config, given, world = request.config, request.given, request.world
    fixed = {axis: getattr(config.parallel, name) for axis, name in DEGREES.items()}
    sizes = {
        axis: [fixed[axis]] if DEGREES[axis] in given else divisors(world)
        for axis in ("tp", "cp", "pp")
    }
    pps = [n for n in sizes["pp"] if n <= config.model.num_layers] or sizes["pp"]
    expert = [getattr(config.parallel, FIELDS["ep"])]
    if FIELDS["ep"] not in given and config.model.num_experts is not None:
        expert = divisors(config.model.num_experts)
    meshes = list(product(sizes["tp"], sizes["cp"], pps))
    copies = max(fixed["dp_replicate"], 1) * max(fixed["dp_shard"], 1)
    whole = [mesh for mesh in meshes if world % (prod(mesh) * copies) == 0]
    for mesh in sorted(whole or meshes[:1], key=lambda mesh: (prod(mesh), mesh)):
        for ep in expert:
            degrees = zip(("tp", "cp", "pp", "ep"), (*mesh, ep), strict=True)
            yield _completed(request, {FIELDS[axis]: size for axis, size in degrees})


def _completed(request: Request, degrees: Change) -> Config:
    """The configuration with these degrees and the settings that the search would add."""
    config, given = request.config.with_values(**degrees), request.given
    parallel, changes = config.parallel, dict[str, Any]()
    if "sequence_parallel" not in given:
        changes["sequence_parallel"] = parallel.tensor_model_parallel_size > 1
    if "data_parallel_sharding_strategy" not in given:
        plain = "no_shard" if parallel.num_distributed_optimizer_instances == 1 else "optim"
        shards = "optim_grads_params" if parallel.pipeline_max_unsharded_stages else plain
        changes["data_parallel_sharding_strategy"] = shards
    if "pipeline_schedule" not in given:
        if parallel.num_sequence_slices > 1:
            cuts = [name for name, schedule in SCHEDULES.items() if schedule.slices]
            changes["pipeline_schedule"] = cuts[0]
        elif parallel.pipeline_in_flight_limit is not None:
            changes["pipeline_schedule"] = "synthesised"
    for kinds, sizes in islice(legal_ways(config, given), 1):
        changes |= {"cp_comm_type": kinds, "hierarchical_context_parallel_sizes": sizes}
    return config.with_values(**changes)


def _works(request: Request, rules: Iterable[Mistake], *, legal: bool) -> Iterator[str]:
    """Further flags with which some layout fits, the smallest changes first."""
    suggested = set[str]()

    def new(changes: Iterable[Change]) -> Iterator[str]:
        for change in changes:
            text = _typed(change)
            if text not in suggested and _has_plan(request, change):
                suggested.add(text)
                yield text

    yield from new(_techniques(request) if legal else _by_rules(rules))
    for text in _released(request):
        if text not in suggested:
            suggested.add(text)
            yield text
    if legal:  # it also works with more than this many GPUs
        yield from islice(new(_more(request)), 1)
    else:
        yield from new(_around(request))
    if not suggested:
        yield from islice(_all_released(request), 1)


def _has_plan(request: Request, change: Change) -> bool:
    """Whether some layout is legal and fits once this is changed."""
    try:
        return has_plan(request.but(**change))
    except ConfigError:
        return False


def _techniques(request: Request) -> Iterator[Change]:
    """Memory techniques that the search does not try by itself."""
    yield from _on_host_ways(request)
    if "recompute_granularity" in request.given:
        yield {"recompute_granularity": "full", "recompute_method": "uniform"}


def _by_rules(rules: Iterable[Mistake]) -> Iterator[Change]:
    """The suggestions of the broken rules, if they are flags."""
    for rule in rules:
        for text in rule.works:
            words = text.split()
            if all(re.fullmatch(r"[a-z]+=\d+", word) for word in words):
                pairs = (word.split("=") for word in words)
                words = [f"--{n}={size}" for n, size in pairs if n in ALIASES]  # dp follows
            elif text in SCHEDULES:
                words = [f"--pipeline-schedule={text}"]
            mistakes = Mistakes()
            given = scan(words, SETTINGS.values(), mistakes)
            if given.values and not given.words and not mistakes.found:
                yield given.values


def _released(request: Request) -> Iterator[str]:
    """Changes of one given setting: to the value that the search would choose, or to none."""
    for name in request.fixed():
        fitting = _fitting(request, {}, [name])
        changes = [_instead(candidate, [name]) for candidate in fitting]
        typed = [_typed(change) for change in changes if _has_plan(request, change)]
        if any(typed):
            yield next(filter(None, typed))
        elif fitting:
            yield f"without {SETTINGS[name].flag}"


def _more(request: Request) -> Iterator[Change]:
    """Multiples of the number of GPUs."""
    yield from ({"num_gpus": request.world * times} for times in GROWTH)


def _around(request: Request) -> Iterator[Change]:
    """Usual numbers of GPUs near the given one."""
    power, nodes = 1 << (request.world.bit_length() - 1), request.world // 8 * 8
    near = {n for n in (power, 2 * power, nodes, nodes + 8) if n > 0} - {request.world}
    yield from ({"num_gpus": count} for count in sorted(near))


def _all_released(request: Request) -> Iterator[str]:
    """Changes of as few given settings at once as possible, if necessary with more GPUs."""
    for count in ({}, *_around(request), *_more(request)):
        names = list(request.fixed())
        if not _fitting(request, count, names):
            continue
        for name in request.fixed():
            fewer = [other for other in names if other != name]
            names = fewer if _fitting(request, count, fewer) else names
        for candidate in _fitting(request, count, names):
            change = count | _instead(candidate, names)
            if change and _typed(change) and _has_plan(request, change):
                yield _typed(change)
        flags = " ".join(SETTINGS[name].flag for name in names)
        yield f"{_typed(count)} without {flags}".strip()
        return


def _fitting(request: Request, count: Change, names: Iterable[str]) -> list[Candidate]:
    """The smallest layouts that fit, with these settings left to the search."""
    try:
        return fitting_layouts(request.without(names).but(**count))
    except ConfigError:
        return []


def _instead(candidate: Candidate, names: Iterable[str]) -> Change:
    """The values of these settings in the layout."""
    return {name: candidate.layout.config.value(name) for name in names}


def _typed(change: Change) -> str:
    """The flags for a change."""
    return " ".join(
        f"--gpus {value}" if name == "num_gpus" else SETTINGS[name].typed(value)
        for name, value in change.items()
    )
