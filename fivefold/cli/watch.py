"""`fivefold watch`: show a run in the terminal while it runs."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from fivefold.cli.helps import RUN_HELP
from fivefold.config.settings import Allowed, argument, option
from fivefold.config.sources import load_options
from fivefold.errors import DataError
from fivefold.report.facts import facts
from fivefold.report.history import RunHistory, read_history
from fivefold.report.settings import run_config
from fivefold.units import human_seconds

HEIGHTS = "▁▂▃▄▅▆▇█"
SILENT = 10
"""Usual times of a step without one, after which a run is said to be silent."""
AT_LEAST = 60.0
"""Seconds for which a run may be silent in any case: it may save or evaluate."""
EVENTS = 6  # latest ones
LONGEST = 86_400.0  # seconds between looks
Interval = Annotated[float, Allowed(lambda v: 0 < v <= LONGEST, f"in (0, {LONGEST:,.0f}]")]


@dataclass(frozen=True)
class Options:
    """Show the progress of a run in the terminal, until its last step.

    It only reads files of the run folder, so it works on any machine that sees the folder.
    """

    run: str = argument(RUN_HELP)
    interval: Interval = option(2.0, "seconds between updates")
    once: bool = option(False, "print the state once and exit")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    folder = Path(options.run)
    run_config(folder)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    history = read_history(folder)
    if options.once or not console.is_terminal:
        print("\n".join(view(history, console.width)))  # rich would exit if the reader has gone
        return 0
    with Live(Text(""), console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(Text("\n".join(view(history, console.width))), refresh=True)
            if history.is_finished:
                return 0
            time.sleep(options.interval)
            with suppress(DataError):  # the file is being replaced; the next look reads it
                history = read_history(folder)


def view(history: RunHistory, width: int) -> list[str]:
    """The lines that describe a run."""
    rows = facts([history])
    names = max(len(name) for name, _ in rows)
    lines = [history.name, "", *(f"{name:<{names}}  {value}" for name, value in rows)]
    if losses := [*history.values("loss").values()]:
        lines += [f"{'loss':<{names}}  {sparkline(losses, max(10, width - names - 4))}"]
    lines += ["", *(f"{each.when:%H:%M:%S}  {each.what}" for each in history.happenings[-EVENTS:])]
    return [line[:width] for line in [*lines, "", _state(history)]]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks of eight heights, at most this many: means of equal stretches.

    >>> sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8), sparkline([3, 3, 9, 9], 2)
    ('▁▂▃▄▅▆▇█', '▁█')
    """
    size = -(-len(values) // width)
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(HEIGHTS[round((mean - low) * scale)] for mean in means)


def _state(history: RunHistory) -> str:
    if history.is_finished:
        return "finished"
    usual = history.usual("seconds")
    if history.seen is None or usual is None:
        return "no step has ended yet"
    silent = max(0.0, (datetime.now().astimezone() - history.seen).total_seconds())
    left = human_seconds(usual * (history.config.training.num_steps - history.done))
    if silent > max(AT_LEAST, SILENT * usual):
        return f"no step for {human_seconds(silent)}, a step takes {human_seconds(usual)}"
    return f"{left} left; last step {human_seconds(silent)} ago"
