"""`fivefold report`: write a page about one run or two."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.cli.helps import RUN_HELP
from fivefold.config.settings import argument, option
from fivefold.config.sources import load_options
from fivefold.errors import FivefoldError
from fivefold.files import telling_unwritable, write_atomic
from fivefold.report.history import read_history
from fivefold.report.page import page

FILE = "report.html"


@dataclass(frozen=True)
class Options:
    """Write a page about a run, or about two runs side by side.

    It shows losses, throughput, memory, events, the measurements of --audit and --profile compared
    with theory, the load of experts, settings and machine. The page is one file that needs no
    network.
    """

    run: str = argument(RUN_HELP)
    other: str | None = argument("run folder to compare it with", None)
    cluster: str | None = option(
        None,
        "kind of GPU, or TOML file of a cluster, to show which layouts would be faster "
        "(default: the GPU of the run)",
    )
    html: str | None = option(None, f"file to write (default: {FILE} in the first run's folder)")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    folders = [Path(name) for name in (options.run, options.other) if name is not None]
    gains = [line for folder in folders for line in _gains(folder, options.cluster)]
    text = page([read_history(folder) for folder in folders], gains)
    path = Path(options.html) if options.html else folders[0] / FILE
    with telling_unwritable(path, attempt=f"--html {FILE}, or another file that can be written"):
        write_atomic(path, text)
    print(f"wrote {path}")
    return 0


def _gains(folder: Path, cluster: str | None) -> list[str]:
    """What a run could gain on its machine as the run itself measured it; empty if unknown."""
    from fivefold.cli.from_runs import could_gain

    try:
        return could_gain(folder, cluster)
    except FivefoldError:
        if cluster is not None:
            raise
        return []
