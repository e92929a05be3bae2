"""The error with which every rank ends a run that must not go on."""

from collections.abc import Sequence
from contextlib import suppress
from shlex import quote

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import CheckpointError, Mistake, TrainingError


def stopped(
    checkpointer: Checkpointer, what: str, why: Sequence[str], then: str, attempt: str | None
) -> TrainingError:
    """An error for all ranks to raise, after a checkpoint under way has been written.

    Args:
        checkpointer: that of the run's own folder.
        what: the failure, as the first line of the message.
        why: further lines of the message.
        then: text that goes before the number of the latest checkpoint.
        attempt: what may help; None if the failure may not come again, so that no setting is to
            blame.
    """
    with suppress(CheckpointError):  # the failure itself matters more now
        checkpointer.wait()
    latest = checkpointer.latest()
    kept = "none of this start" if latest is None else f"step {latest}"
    folder = quote(str(checkpointer.folder.parent))
    again = f"--save {folder}, and another machine if it comes again"
    why = (*why, f"{then}latest checkpoint: {kept}")
    return TrainingError(Mistake(what, why, attempt=attempt or again))
