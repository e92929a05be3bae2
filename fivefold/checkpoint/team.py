"""Runs jobs on several ranks, each of which learns of failures on the others."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from fivefold.errors import CheckpointError, FivefoldError, Mistake
from fivefold.files import caused_by_full_disk
from fivefold.mesh.collectives import gather_objects
from fivefold.mesh.groups import lost_connection
from fivefold.units import ranks_named

T = TypeVar("T")


class DiskFullError(CheckpointError):
    """A job of several ranks that failed because the disk of one of them is full."""


class _Failure(NamedTuple):
    reason: str
    disk_full: bool = False


class Team:
    """The ranks of a process group, or a single process.

    All methods are collective. A failure on one rank raises the same error on every rank, so that
    no rank continues or keeps waiting.

    Args:
        group: group that can send objects (gloo); None: only this process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def together(self, job: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; every rank gets all results, by rank.

        Raises:
            DiskFullError: `job` ("saving step 3") failed on a rank whose disk is full.
            CheckpointError: `job` failed; the error names the ranks and the reasons.
        """
        outcomes = gather_objects(_attempt(work, self.size), self.group)
        self._raise_if_any(job, [failure for _, failure in outcomes])
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def each(self, job: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank; each gets its own result. Raises as `together` does."""
        result, failure = _attempt(work, self.size)
        self._raise_if_any(job, gather_objects(failure, self.group))
        return result  # type: ignore[return-value]

    def leader(self, job: str, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; every rank gets its result.

        Raises:
            CheckpointError: `job` failed.
        """
        return self.together(job, work if self.rank == 0 else lambda: None)[0]  # type: ignore

    def _raise_if_any(self, job: str, failures: list[_Failure | None]) -> None:
        if failed := {rank: why for rank, why in enumerate(failures) if why is not None}:
            full = any(failure.disk_full for failure in failed.values())
            kind = DiskFullError if full else CheckpointError
            raise kind(Mistake(f"{job} failed", tuple(_reasons(failed, self.size))))


def _attempt(work: Callable[[], T], size: int) -> tuple[T | None, _Failure | None]:
    try:
        return work(), None
    except CheckpointException as error:  # raised by DCP on every rank
        for cause, _ in error.failures.values():
            if size == 1 and not isinstance(cause, Exception):  # a signal, which is no failure
                raise cause from None
        failed = {rank: _failure(cause) for rank, (cause, _) in error.failures.items()}
        full = any(failure.disk_full for failure in failed.values())
        return None, _Failure("; ".join(_reasons(failed, size)), full)
    except Exception as error:
        if lost_connection(error):  # no other rank can be told
            raise
        return None, _failure(error)


def _failure(error: BaseException) -> _Failure:
    if isinstance(error, FivefoldError):
        return _Failure(str(error))
    return _Failure(f"{type(error).__name__}: {error}", caused_by_full_disk(error) is not None)


def _reasons(failed: Mapping[int, _Failure], size: int) -> list[str]:
    """Each reason once, with the ranks that it applies to, unless it applies to all."""
    by_reason: dict[str, list[int]] = {}
    for rank, failure in sorted(failed.items()):
        by_reason.setdefault(failure.reason, []).append(rank)
    return [
        reason if len(ranks) == size else f"{ranks_named(ranks)}: {reason}"
        for reason, ranks in by_reason.items()
    ]
