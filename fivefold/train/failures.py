"""Why a rank ended badly, as it is passed on and as people read it."""

import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.errors import ConfigError, FivefoldError
from fivefold.files import write_atomic
from fivefold.mesh.groups import lost_connection
from fivefold.train.roll_call import Suspect, place_of
from fivefold.train.signals import STOP_SIGNALS

REPORT_LIMIT = 6_000  # characters of message and of traceback: both fit in a pipe's 64 KiB
PLACES_SHOWN = 8


@dataclass(frozen=True)
class Failure:
    """Why a rank ended badly.

    Attributes:
        cause: one line, "killed by SIGSEGV" or "ValueError: ...", or a FivefoldError's message.
        for_user: `cause` is the whole message of a FivefoldError.
        consequence: only a symptom: the rank lost the connection to another one, or waited for it
            in vain.
        when: seconds on the system's monotonic clock, which all processes of a machine share.
        status: what the program should exit with.
        place: the innermost function of ours, empty if there was no exception.
        traceback: its text, empty if there was no exception.
        traceback_file: where it was written, if it was.
        details: further lines for people.
    """

    cause: str
    when: float
    status: int = 1
    for_user: bool = False
    consequence: bool = False
    place: str = ""
    traceback: str = ""
    traceback_file: str | None = None
    details: tuple[str, ...] = ()

    @property
    def timed_out(self) -> bool:
        """Whether it is that another rank was waited for in vain, which may still live."""
        words = ("timed out", "timeout")
        return self.consequence and any(word in self.cause.lower() for word in words)


def raised(error: BaseException, rank: int, folder: Path | None) -> Failure:
    """What an exception on this rank says; its traceback goes to `folder`, if there is one."""
    when = time.monotonic()
    if isinstance(error, FivefoldError):
        status = 2 if isinstance(error, ConfigError) else 1
        return Failure(str(error)[:REPORT_LIMIT], when, status=status, for_user=True)
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
    """The end by a signal; `stopping` = the rank was told to end."""
    cause = f"killed by {signal.Signals(signum).name}"
    if signum == signal.SIGKILL:
        cause += "; if nobody ran kill -9, the machine ran out of memory (dmesg says so)"
    told_to = stopping and signum in STOP_SIGNALS
    return Failure(cause, time.monotonic(), status=128 + signum, consequence=told_to)


def left(status: int) -> Failure:
    """The end of a process that did not say that its work was done."""
    return Failure(f"left with status {status} before the end", time.monotonic(), status or 1)


def suspected(suspect: Suspect, symptom: tuple[int, Failure], folder: Path | None) -> Failure:
    """That a rank holds up the others, one of which noticed it by `symptom`."""
    return Failure(
        suspect.cause,
        symptom[1].when,
        traceback=suspect.stack,
        traceback_file=_write(folder, suspect.rank, suspect.stack) if suspect.stack else None,
        details=noticed(symptom),
    )


def noticed(symptom: tuple[int, Failure]) -> tuple[str, ...]:
    """Which rank noticed a failure of another one, and how: a line for people."""
    rank, failure = symptom
    said = re.sub(r"\[\S*third_party\S*\] ", "", failure.cause).split(". ")[0]
    return (f"noticed by rank {rank}: {said}",)


def disagreeing(symptom: Failure, places: Mapping[int, str]) -> Failure:
    """Add to a symptom for which no rank is to blame where each of them waited, if that differs."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_at.setdefault(place, []).append(rank)
    if len(ranks_at) < 2:
        return symptom
    shown = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:PLACES_SHOWN]))}"
        f"{', ...' if len(ranks) > PLACES_SHOWN else ''} in {place}"
        for place, ranks in [*ranks_at.items()][:PLACES_SHOWN]
    ]
    return replace(symptom, details=("every rank waited for others:", *shown))


def explain(failure: Failure, place: str, world_size: int) -> None:
    """Print to stderr what happened on the rank called `place`, and that the others end."""
    if failure.for_user:
        print(f"error: {failure.cause}", file=sys.stderr, flush=True)
        return
    lines = [f"error: {place}: {failure.cause}", *(f"  {line}" for line in failure.details)]
    if world_size > 1:
        others = "other rank was" if world_size == 2 else f"other {world_size - 1} ranks were"
        lines.append(f"  the {others} stopped")
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
