"""Times ways to do the same in turns, round after round: a busy machine disturbs all alike."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch


class Taken(NamedTuple):
    """Seconds of one call, and CPU seconds of this process meanwhile, user and system."""

    wall: float
    cpu: float


def timed(run: Callable[[], object]) -> Taken:
    """What a call takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Taken]]:
    """What each way takes in each round, after one that only warms up."""
    every = [{name: timed(run) for name, run in ways.items()} for _ in range(rounds + 1)]
    return {name: [each[name] for each in every[1:]] for name in ways}


def cpu_ratio(taken: Sequence[Taken], base: Sequence[Taken]) -> float:
    """The median over rounds of CPU seconds over those of another way."""
    return median(one.cpu / other.cpu for one, other in zip(taken, base, strict=True))


def about(what: str) -> str:
    """The head of a table: today, the machine and how busy it is, torch, and what was measured."""
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs ({_processor()}), "
        f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {what}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
