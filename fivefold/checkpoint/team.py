"""Ranks that do a job together and learn of each other's failures."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from fivefold.errors import CheckpointError, Mistake

T = TypeVar("T")


class Team:
    """The ranks of a process group, or one process alone.

    Both methods are collective, and a failure on one rank raises the same error on every rank:
    none goes on, and none is left waiting.

    Args:
        group: a group that can send objects (gloo); None: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def together(self, job: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; every rank gets all results, by rank.

        Raises:
            CheckpointError: `job` ("saving step 3") failed; on which ranks, and why.
        """
        outcomes = self._gather(_attempt(work))
        failures: dict[str, list[int]] = {}
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                failures.setdefault(failure, []).append(rank)
        if failures:
            reasons = (f"{_ranks(ranks, self.size)}{reason}" for reason, ranks in failures.items())
            raise CheckpointError(str(Mistake(f"{job} failed", tuple(reasons))))
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def leader(self, job: str, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; every rank gets its result.

        Raises:
            CheckpointError: `job` failed.
        """
        return self.together(job, work if self.rank == 0 else lambda: None)[0]  # type: ignore

    def _gather(self, mine: T) -> list[T]:
        if self.group is None:
            return [mine]
        everyones: list = [None] * self.size
        dist.all_gather_object(everyones, mine, group=self.group)
        return everyones


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return work(), None
    except CheckpointException as error:
        reasons = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
        return None, "; ".join(sorted(reasons))
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _ranks(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
