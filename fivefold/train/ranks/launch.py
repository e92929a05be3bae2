"""Starts ranks on this machine, and reports which one failed first, and why.

Forking a parent that has already imported torch starts eight ranks in a fraction of the seconds
that eight interpreters take.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fivefold.errors import RanksFailed
from fivefold.train.ranks import failures
from fivefold.train.ranks.children import Worker, import_what_ranks_import
from fivefold.train.ranks.failures import Failure
from fivefold.train.ranks.local_ranks import LocalRanks
from fivefold.train.ranks.rejoin import Orders
from fivefold.train.ranks.signals import StopRequest


@dataclass(frozen=True)
class End:
    """How ranks ended.

    Attributes:
        status: exit status for the shell: 0 if every rank returned 0 or None; that of the error;
            128 + signal if killed; else 1 or what the worker returned.
        place: the rank that failed first, with its coordinates; empty if none failed by itself.
        why: the first line of its failure.
        signum: signal that asked the run to stop; None if none did.
        rank: that rank; None if none failed by itself.
        of_settings: as in `Failure`.
    """

    status: int
    place: str = ""
    why: str = ""
    signum: int | None = None
    rank: int | None = None
    of_settings: bool = False

    @property
    def stopped(self) -> bool:
        """Whether a signal asked the run to stop."""
        return self.signum is not None

    def raise_if_failed(self, what: str) -> None:
        """Raise an error if a rank failed; the reason has been printed.

        Raises:
            RanksFailed: with the message `what`.
            SystemExit: nothing failed, but a signal asked to stop.
        """
        if self.signum is not None:
            raise SystemExit(self.status or 128 + self.signum)
        if self.status:
            raise RanksFailed(what, self.status)


def launch_local(worker: Worker, nproc: int) -> int:
    """Run `worker(rank_env)` as `run_ranks` does, and return the exit status for the shell."""
    return run_ranks(worker, nproc).status


def run_ranks(
    worker: Worker,
    nproc: int,
    *,
    describe: Callable[[int], str] | None = None,
    errors_folder: Path | None = None,
    threads: int | None = None,
    revive: Callable[[End], tuple[Orders | None, str]] | None = None,
) -> End:
    """Run `worker(rank_env)` in `nproc` forked processes.

    Each rank has torchrun's environment variables, and ends when the parent ends, however it ends.
    When a rank fails, the first cause is printed to stderr with the rank's coordinates and the
    others are stopped. The first SIGINT, SIGTERM or SIGUSR1 is passed to every rank once; a second
    Ctrl-C ends them.

    Args:
        worker: called in each child; what it returns is the child's exit status (None = 0).
        describe: rank -> its coordinates, such as "PP(1) DP(0) CP(0) TP(1)".
        errors_folder: where `rank-N.txt` with the full traceback of rank N is written. If None,
            the traceback of the first cause is printed.
        threads: threads of each rank, unless OMP_NUM_THREADS says otherwise; None: its share of the
            cores.
        revive: how the ranks would end -> what the living ones and new ones do together, as
            `rejoin.keep_on` does it, or None if they end, and a line that says so; None: they end.
    """
    assert not torch.cuda.is_initialized(), "CUDA does not survive a fork"
    import_what_ranks_import()
    cause: tuple[int, Failure] | None = None
    message = ""
    with StopRequest() as stop:
        crew = LocalRanks(
            worker,
            nproc,
            stop,
            goes_on=revive is not None,
            errors_folder=errors_folder,
            threads=threads,
        )
        try:
            crew.start()
            cause = crew.watch()
            while cause is not None and revive is not None:
                end = _end(cause, describe, stop)
                orders, message = revive(end)
                if orders is None:
                    break
                failures.explain(cause[1], end.place, nproc, goes_on=True)
                print(message, file=sys.stderr, flush=True)
                crew.go_on(cause[0], orders)
                cause = crew.watch()
        except KeyboardInterrupt:  # a second Ctrl-C
            cause = None
        finally:
            crew.end()
    if cause is None:
        return End(128 + (stop.signum or 0) if crew.failed else 0, signum=stop.signum)
    end = _end(cause, describe, stop)
    failures.explain(cause[1], end.place, nproc)
    if message:
        print(message, file=sys.stderr, flush=True)
    return end


def _end(
    cause: tuple[int, Failure], describe: Callable[[int], str] | None, stop: StopRequest
) -> End:
    rank, failure = cause
    why = failure.cause.splitlines()[0]
    return End(
        failure.status,
        place_name(rank, describe),
        why,
        signum=stop.signum,
        rank=rank,
        of_settings=failure.of_settings,
    )


def place_name(rank: int, describe: Callable[[int], str] | None) -> str:
    """The name of a rank, with its coordinates if `describe` is given."""
    return f"rank {rank}" + (f" {describe(rank)}" if describe else "")
