"""Step times measured by finished runs."""

from collections.abc import Sequence
from math import log, sqrt
from pathlib import Path
from statistics import median, stdev

from fivefold.check import check
from fivefold.errors import ConfigError, DataError, Mistake
from fivefold.hardware import find_gpu
from fivefold.learn.posterior import Observation
from fivefold.report.history import RunHistory, read_history

LEAST_NOISE = 0.01
"""Least standard deviation of a logarithm of a run's usual step: another day gives another."""

MOST_RANKS = 1 << 20
"""Largest number of ranks that is believed; a larger one is from a damaged line."""

UNKNOWN_NOISE = 0.3
"""That of a single step, whose spread is not seen."""


def observed(folder: Path) -> tuple[Observation, RunHistory]:
    """A run's measured step time in its layout.

    The first step of each start, which prepares much, is left out, and so are those of starts by
    another command, with other settings or on another number of ranks.

    Raises:
        DataError: it is not a run folder, or no step of it was timed.
        ConfigError: its layout does not fit its ranks.
    """
    history = read_history(folder)
    # Others may have been taken in another layout, or be of smaller batches.
    training, whole_batch = history.config.training, history.config.training.step_tokens
    own = [r for r in history.usual_steps if r.get("tokens", whole_batch) == whole_batch]
    whole, each = (history.values(f"tokens_per_second{per}", own) for per in ("", "_per_rank"))
    ratios = {step: whole[step] / each[step] for step in whole if each.get(step)}
    worlds = {step: round(ratio) for step, ratio in ratios.items() if 0.5 < ratio < MOST_RANKS}
    ranks = next(reversed(worlds.values()), 0)
    timed = history.values("seconds", own).items()
    times = [s for step, s in timed if s > 0 and worlds.get(step) == ranks]
    if not times:
        needed = max(history.done, training.batch_sizes.smaller_steps) + 2
        raise DataError(
            Mistake(
                f"{folder} has no times of steps of the whole batch after the first one of "
                "its latest start",
                attempt=f"two more steps at least: {training.lasting(needed)}",
            )
        )
    layout = check(history.config, ranks, planned=True)
    return Observation(str(folder), layout, median(times), noise_of(times)), history


def noise_of(times: Sequence[float]) -> float:
    """Standard deviation of the logarithm of the median of steps' times."""
    if len(times) < 2:
        return UNKNOWN_NOISE
    spread = stdev(map(log, times)) * sqrt(1.57 / len(times))  # of a median of normal samples
    return max(spread, LEAST_NOISE)


def machine_of(histories: Sequence[RunHistory]) -> str:
    """The kind of GPU on which all of these runs ran.

    Raises:
        ConfigError: it is not known, or they ran on several kinds.
    """
    names = {_device(history) for history in histories}
    gpu = find_gpu(names.pop()) if len(names) == 1 else None
    if names or gpu is None:
        what = "what the runs ran on is no one kind of GPU whose constants are known"
        devices = ", ".join(sorted({_device(history) for history in histories}))
        raise ConfigError(
            Mistake(
                what,
                (
                    f"they ran on: {devices}",
                    "measure the machine first: fivefold plan --calibrate machine.toml --nproc N",
                ),
                attempt="--cluster machine.toml",
            )
        )
    return gpu.name


def _device(history: RunHistory) -> str:
    devices = history.starts[-1].get("devices") if history.starts else None
    return str(devices[0]) if devices else "CPUs"
