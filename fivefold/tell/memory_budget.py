"""Reports the choice for a memory budget and its cost, or why nothing fits."""

from collections.abc import Iterator
from math import ceil

from fivefold.config.config import SETTINGS, Config
from fivefold.errors import ConfigError, Mistake
from fivefold.search.candidate import Candidate
from fivefold.search.memory_budget import CHOSEN, MemoryFit
from fivefold.search.request import Request
from fivefold.tell.describe import memory_words
from fivefold.units import human_bytes, human_seconds


def chosen(request: Request, fit: MemoryFit) -> Iterator[str]:
    """The choice in words, its flags, and memory and time of every pipeline rank compared with no
    recomputation."""
    assert fit.best is not None
    best, plain, room = fit.best, fit.plain, human_bytes(request.cluster.room)
    yield f"memory budget: {room} of tensors on each device, by the times of {request.cluster.name}"
    yield f"  {_shown(plain)}{'' if plain.memory.fits else ': does not fit'}"
    if best is not plain:
        more = best.seconds - plain.seconds
        cost = f"{human_seconds(more)} ({more / plain.seconds:.1%}) more" if more > 0 else "no more"
        yield f"  {_shown(best)}: {cost}, the least of all that fit ({fit.timed:,} were timed)"
        for before, after in zip(plain.memory.ranks, best.memory.ranks, strict=True):
            sizes = f"{human_bytes(before.peak)} -> {human_bytes(after.peak)}"
            yield f"  pipeline rank {after.pp_rank}: {sizes}, at {after.act}"
    yield f"  the same as {flags(best, request.config)}"


def nothing_fits(request: Request, fit: MemoryFit) -> ConfigError:
    """The error if no choice fits, with the smallest one."""
    least = fit.smallest
    memory = least.memory
    parts = " + ".join(f"{name} {human_bytes(n)}" for name, n in memory.worst.parts.items())
    needs = ceil(memory.max_allocated / 2**20)
    works = [f"--memory-budget {needs}MiB"] if memory.missing_on_host <= 0 else []
    return ConfigError(
        Mistake(
            "no recomputation or offloading makes this layout fit "
            f"{human_bytes(request.cluster.room)} of tensors on each device",
            (f"the least: {_shown(least)}", f"pipeline rank {memory.worst.pp_rank}: {parts}"),
            tuple(works),
        )
    )


def flags(candidate: Candidate, config: Config) -> str:
    """The flags that make the same choice without a budget, added to those of `config`."""
    memory = candidate.layout.config.memory
    values = {name: getattr(memory, name) for name in CHOSEN}
    changed = [SETTINGS[name].typed(v) for name, v in values.items() if v != config.value(name)]
    return " ".join(changed) or "no flag at all"


def _shown(candidate: Candidate) -> str:
    words = ", ".join(memory_words(candidate.layout)) or "no recompute"
    peak = human_bytes(candidate.memory.max_allocated)
    return f"{words}: {peak}, {human_seconds(candidate.seconds)} a step"
