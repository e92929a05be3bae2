"""`fivefold audit`: compare a run with what theory predicts for its layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.cli.helps import JSON_HELP, RUN_HELP
from fivefold.cli.verdict import tell
from fivefold.config.settings import argument, option
from fivefold.config.sources import load_options
from fivefold.report.audited import audited


@dataclass(frozen=True)
class Options:
    """Compare what a run sent, held and computed in one step with what theory predicts.

    The run must have been trained with --audit, which measures its second step on every rank.
    Bytes on the wire, weights, gradients, optimizer state and matrix products must be equal,
    activations within 3 %; the exit status is 0 only if they are. With --cluster, the step time
    and the peak of GPU memory are predicted for that machine.
    """

    run: str = argument(RUN_HELP)
    cluster: str | None = option(
        None, "kind of GPU, or TOML file of a cluster, for which to predict the step time"
    )
    json: bool = option(False, JSON_HELP)


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    return tell(audited(Path(options.run), options.cluster), as_json=options.json)
