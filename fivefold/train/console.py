"""Console output of a run: a banner, one aligned line per step, evaluations and warnings.

On a terminal a progress bar stays below the lines; in a log there are only plain lines. NO_COLOR
and TERM=dumb are honoured (by rich).
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from sys import maxsize
from typing import TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from fivefold.train.metrics import EvalMetrics, StepMetrics
from fivefold.units import human_bytes, human_count, human_seconds, wrapped

LOG_WIDTH = 160  # characters per line in a log, which nobody wraps
HEADER_EVERY = 40  # lines, on a terminal
ETA_STEPS = 20
REFRESH_SECONDS = 0.2
GAP = "  "
NARROWEST = 20  # characters of an explanation beside a figure


def _plain(x: float) -> str:
    return f"{x:.3f}" if abs(x) < 10_000 else f"{x:.2e}"


@dataclass(frozen=True)
class StepColumn:
    """One figure of the step line; in a narrow terminal, columns of the highest `rank` go first."""

    title: str
    width: int
    rank: int
    text: Callable[[StepMetrics], str]

    @property
    def space(self) -> int:
        """The width of the column in characters."""
        return max(self.width, len(self.title))


class _RichConsole(rich.console.Console):
    """A console that raises the error of a pipe whose reader has gone, instead of SystemExit."""

    def on_broken_pipe(self) -> None:
        raise


class Console:
    """Prints a run for one person; a Sink for metrics.

    Args:
        total_steps: number of steps at the end of the run.
        device: name of a rank in the column titles, "gpu" or "rank".
        peak_known: whether the device's peak is known, so that there is an MFU to show.
        experts: whether the model has experts, whose load is shown.
        log_interval: steps between lines.
        stream: output stream; colour and progress bar are used only if it is a terminal.
        width: width of the lines in characters; None: that of the terminal.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        device: str = "rank",
        peak_known: bool = False,
        experts: bool = False,
        log_interval: int = 1,
        stream: TextIO | None = None,
        width: int | None = None,
    ) -> None:
        stream = stream or sys.stdout
        terminal = stream.isatty()
        width = width or (None if terminal else LOG_WIDTH)
        self._console = _RichConsole(
            file=stream, width=width, highlight=False, soft_wrap=not terminal, emoji=False
        )
        self._total = total_steps
        self._interval = log_interval
        self._recent: deque[float] = deque(maxlen=ETA_STEPS)
        self._columns = self._fitting(device, peak_known, experts)
        self._lines = 0
        self._refreshed = 0.0
        self._repeat_header = terminal
        self._progress: Progress | None = None
        if terminal and not self._console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", style="dim"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[eta]}", style="dim"),
                console=self._console,
                transient=True,
                auto_refresh=False,
                expand=True,
            )
            self._task = self._progress.add_task("training", total=total_steps, eta="")

    def banner(self, title: str, rows: Iterable[tuple[str, str, str]]) -> None:
        """Print a title and aligned rows of (name, value, explanation)."""
        rows = list(rows)
        names = max((len(name) for name, _, _ in rows), default=0)
        values = max((len(value) for _, value, why in rows if why), default=0)
        self._print(Text(title, style="bold"))
        start = names + values + 3 * len(GAP)
        room = max(self._console.width - start, NARROWEST) if self._console.is_terminal else maxsize
        for name, value, why in rows:
            first, *more = wrapped(why, room)
            line = Text(f"  {name:<{names}}  ")
            line.append(f"{value:<{values}}" if why else value)
            line.append(f"  {first}" if why else "", style="dim")
            self._print(line)
            for text in more:
                self._print(Text(" " * start + text, style="dim"))
        self._print(Text(""))

    def record(self, metrics: StepMetrics | EvalMetrics) -> None:
        """Print an evaluation, or a step if `log_interval` selects it."""
        if isinstance(metrics, EvalMetrics):
            self._print_evaluation(metrics)
        else:
            self._recent.append(metrics.seconds)
            last = metrics.step == self._total
            if metrics.step % self._interval == 0 or metrics.step == 1 or last:
                self._print_step(metrics)
            if self._progress and time.monotonic() - self._refreshed > REFRESH_SECONDS:
                eta = f"{human_seconds(self._eta_seconds(metrics))} left"
                self._progress.start()
                self._progress.update(self._task, completed=metrics.step, eta=eta)
                self._progress.refresh()
                self._refreshed = time.monotonic()

    def note(self, text: str) -> None:
        """Print a line about an event, such as "checkpoint 500 saved in 2.1 s"."""
        self._print(Text(text, style="dim"))

    def warning(self, text: str) -> None:
        """Print a warning, which does not stop the run."""
        self._print(Text(f"warning: {text}", style="yellow"))

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress:
            self._progress.stop()

    def _print_step(self, metrics: StepMetrics) -> None:
        if self._lines == 0 or (self._repeat_header and self._lines % HEADER_EVERY == 0):
            titles = GAP.join(f"{c.title:>{c.space}}" for c in self._columns)
            self._print(Text(titles, style="dim"))
        self._lines += 1
        self._print(Text(GAP.join(f"{c.text(metrics):>{c.space}}" for c in self._columns)))

    def _print_evaluation(self, metrics: EvalMetrics) -> None:
        of = f" of {metrics.name}" if metrics.name else ""
        self._print(
            Text(
                f"step {metrics.step}: validation loss{of} {metrics.loss:.4f}, perplexity "
                f"{metrics.perplexity:.4g} ({human_count(metrics.tokens)} tokens in "
                f"{human_seconds(metrics.seconds)})",
                style="cyan",
            )
        )

    def _print(self, line: Text) -> None:
        self._console.print(line)

    def _eta_seconds(self, metrics: StepMetrics) -> float:
        """Seconds left, from the median step, which ignores slow steps that compiled or saved."""
        return statistics.median(self._recent) * (self._total - metrics.step)

    def _fitting(self, device: str, peak_known: bool, experts: bool) -> list[StepColumn]:
        """The columns that fit into the line, chosen by importance."""
        digits = len(str(self._total))
        busiest = StepColumn("busiest", 7, 2, lambda m: f"{m.imbalance:.2f} x")  # times the mean
        mfu = StepColumn("MFU", 5, 2, lambda m: f"{m.mfu or 0.0:.1%}")
        columns = [
            StepColumn("step", 2 * digits + 1, 0, lambda m: f"{m.step}/{self._total}"),
            StepColumn("loss", 7, 0, lambda m: f"{m.loss:.4f}"),
            StepColumn("grad norm", 8, 1, lambda m: _plain(m.grad_norm)),
            *([busiest] if experts else []),
            StepColumn("lr", 8, 2, lambda m: f"{m.lr:.2e}"),
            StepColumn("tokens/s", 6, 1, lambda m: human_count(m.tokens_per_second)),
            StepColumn(f"/{device}", 6, 5, lambda m: human_count(m.tokens_per_second_per_rank)),
            StepColumn(
                f"FLOP/s/{device}",
                6,
                6 if peak_known else 3,
                lambda m: human_count(m.flops_per_second_per_rank),
            ),
            *([mfu] if peak_known else []),
            StepColumn("memory", 8, 3, lambda m: human_bytes(m.memory_bytes)),
            StepColumn("data wait", 6, 7, lambda m: human_seconds(m.data_wait_seconds)),
            StepColumn("ETA", 6, 4, lambda m: human_seconds(self._eta_seconds(m))),
        ]
        room = self._console.width
        chosen = []
        for column in sorted(columns, key=lambda c: c.rank):
            room -= column.space + len(GAP)
            if room + len(GAP) < 0:
                break
            chosen.append(column)
        return [column for column in columns if column in chosen]
