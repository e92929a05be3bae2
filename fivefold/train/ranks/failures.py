"""Failures of ranks: what they report to the launcher, and the message that is printed."""

import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from fivefold.errors import ConfigError, FivefoldError, OtherSettings
from fivefold.files import write_atomic
from fivefold.mesh.groups import lost_connection
from fivefold.train.health.rank_status import Suspect
from fivefold.train.health.stack_sampler import place_of
from fivefold.train.ranks.signals import STOP_SIGNALS
from fivefold.units import ranks_named

REPORT_LIMIT = 6_000  # characters of message and of traceback: both fit in a pipe's 64 KiB
PLACES_SHOWN = 8
BY_NOBODY = "if nobody ran kill -9, the machine ran out of memory (dmesg says so)"
UNREAD = "nobody reads what it prints any more: the other end of the pipe has gone"


@dataclass(frozen=True)
class Failure:
    """The reason for which a rank failed.

    Attributes:
        cause: one line, "killed by SIGSEGV" or "ValueError: ...", or a FivefoldError's message.
        for_user: whether `cause` is the whole message of a FivefoldError.
        of_settings: whether the settings cannot run, so that another start could not, either.
        consequence: whether this is only a consequence of another failure: the rank lost the
            connection to another rank, or waited for it too long.
        when: time of the failure, in seconds on the monotonic clock that all processes of a
            machine share.
        status: exit status for the program.
        place: innermost function of Fivefold on the stack; empty if there was no exception.
        traceback: text of the traceback; empty if there was no exception.
        traceback_file: file with the traceback; None if there is none.
        details: further lines of the message.
    """

    cause: str
    when: float
    status: int = 1
    for_user: bool = False
    of_settings: bool = False
    consequence: bool = False
    place: str = ""
    traceback: str = ""
    traceback_file: str | None = None
    details: tuple[str, ...] = ()

    @property
    def timed_out(self) -> bool:
        """Whether the rank waited too long for another rank, which may still be alive."""
        words = ("timed out", "timeout")
        return self.consequence and any(word in self.cause.lower() for word in words)


def raised(error: BaseException, rank: int, folder: Path | None) -> Failure:
    """The failure of an exception on this rank; its traceback is written to `folder`, if any."""
    when = time.monotonic()
    if isinstance(error, FivefoldError):
        cause, lasts = str(error)[:REPORT_LIMIT], isinstance(error, ConfigError | OtherSettings)
        return Failure(cause, when, status=error.status, for_user=True, of_settings=lasts)
    if isinstance(error, BrokenPipeError):  # standard output, as for `main`
        return Failure(UNREAD, when, status=128 + signal.SIGPIPE)
    text = "".join(traceback.format_exception(error))
    message = str(error).strip()[:REPORT_LIMIT]
    cause = f"{type(error).__name__}: {message}".removesuffix(": ")
    if isinstance(error, SystemExit):
        cause = f"left with sys.exit({message}) before the end"
    return Failure(
        cause,
        when,
        consequence=lost_connection(error),
        place=place_of(traceback.extract_tb(error.__traceback__)),
        traceback=text[-REPORT_LIMIT:],
        traceback_file=_write(folder, rank, text),
    )


def killed(signum: int, stopping: bool) -> Failure:
    """The failure of a rank that was killed by a signal, perhaps because it was told to end."""
    cause = f"killed by {signal.Signals(signum).name}"
    if signum == signal.SIGKILL:
        cause += f"; {BY_NOBODY}"
    told_to = stopping and signum in STOP_SIGNALS
    return Failure(cause, time.monotonic(), status=128 + signum, consequence=told_to)


def left(status: int) -> Failure:
    """The failure of a process that exited before it reported that its work was done."""
    return Failure(f"left with status {status} before the end", time.monotonic(), status or 1)


def suspected(suspect: Suspect, symptom: tuple[int, Failure], folder: Path | None) -> Failure:
    """The failure of a rank that keeps others waiting; one of them noticed it by `symptom`."""
    return Failure(
        suspect.cause,
        symptom[1].when,
        traceback=suspect.stack,
        traceback_file=_write(folder, suspect.rank, suspect.stack) if suspect.stack else None,
        details=noticed(symptom),
    )


def noticed(symptom: tuple[int, Failure]) -> tuple[str, ...]:
    """A line that says which rank noticed the failure of another one, and how."""
    rank, failure = symptom
    said = re.sub(r"\[\S*third_party\S*\] ", "", failure.cause).split(". ")[0]
    return (f"noticed by rank {rank}: {said}",)


def disagreeing(symptom: Failure, places: Mapping[int, str]) -> Failure:
    """The symptom with the places where the ranks waited, if these differ."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_at.setdefault(place, []).append(rank)
    if len(ranks_at) < 2:
        return symptom
    listed = islice(ranks_at.items(), PLACES_SHOWN)
    shown = [f"{ranks_named(ranks)} in {place}" for place, ranks in listed]
    return replace(symptom, details=("every rank waited for others:", *shown))


def explain(failure: Failure, place: str, world_size: int, *, goes_on: bool = False) -> None:
    """Print to stderr what happened on the rank `place`, and what happens to the others."""
    if failure.for_user:
        print(f"error: {failure.cause}", file=sys.stderr, flush=True)
        return
    lines = [f"error: {place}: {failure.cause}", *(f"  {line}" for line in failure.details)]
    if world_size > 1:
        others, are, meet = f"other {world_size - 1} ranks", "were", "meet"
        if world_size == 2:
            others, are, meet = "other rank", "was", "meets"
        lines.append(f"  the {others} {f'{meet} a new one' if goes_on else f'{are} stopped'}")
    if failure.traceback_file:
        lines.append(f"  traceback: {failure.traceback_file}")
    elif failure.traceback:
        lines.append(failure.traceback)
    print("\n".join(lines), file=sys.stderr, flush=True)


def _write(folder: Path | None, rank: int, text: str) -> str | None:
    if folder is None:
        return None
    path = folder / f"rank-{rank}.txt"
    try:
        write_atomic(path, text)
    except OSError:  # a full disk, which may well be the cause
        return None
    return str(path)
