"""`fivefold profile`: what torch's profiler saw of a run's ranks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.cli.helps import RUN_HELP
from fivefold.cli.style import note
from fivefold.config.settings import Count, argument, option
from fivefold.config.sources import load_options
from fivefold.files import telling_unwritable, write_atomic
from fivefold.report.settings import run_config
from fivefold.report.traces import RankTrace, longest, merged, read_traces
from fivefold.train.folder.run_folder import RunFolder
from fivefold.units import human_bytes, human_seconds

WIDTH = 60  # characters of an operation's name


@dataclass(frozen=True)
class Options:
    """Show where the time of a profiled step went, rank by rank, and write one trace of all ranks.

    The run must have been trained with --profile --use-pytorch-profiler. The trace is in Chrome's
    format, for ui.perfetto.dev, with named pipeline actions and messages.
    """

    run: str = argument(RUN_HELP)
    top: Count = option(8, "operations to show, those that took the longest")
    trace: str | None = option(None, "file to write (default: profile/trace.json in the folder)")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    folder = Path(options.run)
    there = RunFolder(folder).profile
    logging, traces = run_config(folder, there).logging, read_traces(folder)
    wanted = {*logging.profile_ranks} if logging.use_pytorch_profiler else set[int]()
    for rank in sorted(wanted - {trace.rank for trace in traces}):
        note(f"{folder} has no trace of rank {rank}, which profile_ranks names")
    for trace in traces:
        print("\n".join(shown(trace, options.top)), end="\n\n")
    path = Path(options.trace) if options.trace else there / "trace.json"
    with telling_unwritable(
        path, attempt="--trace trace.json, or another file that can be written"
    ):
        write_atomic(path, json.dumps(merged(traces)))
    print(f"wrote {path}, for ui.perfetto.dev")
    return 0


def shown(trace: RankTrace, top: int) -> Iterator[str]:
    """The lines that show a rank's step."""
    yield f"rank {trace.rank}: {human_seconds(trace.seconds)}"
    acts = ", ".join(f"{kind} {human_seconds(s)}" for kind, s in sorted(trace.acts.items()))
    if acts:
        yield f"  in actions, on the host: {acts}"
    for (axis, op), (count, size) in sorted(trace.messages.items()):
        yield f"  {axis:<12}{op:<15}{count:>6,} x  {human_bytes(size)} sent"
    for name, seconds in longest(trace.operations, top):
        share = seconds / trace.seconds if trace.seconds else 0.0
        yield f"  {name[:WIDTH]:<{WIDTH}}{human_seconds(seconds):>9}{share:>7.1%}"
