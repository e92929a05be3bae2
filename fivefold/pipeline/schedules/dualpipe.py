"""DualPipe and DualPipeV: overlapped pairs of a forward and a backward (DeepSeek-AI, 2024, 2025).

Both run the same eight phases. A rank has two directions: in DualPipe one from each of two copies
of the model, in DualPipeV the two arms of a V.
"""

from collections import deque

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.ir import Act, Kind, pair
from fivefold.pipeline.schedules.fixed import Orders, Task, nearest_choices, only_microbatches


def dualpipe_v(task: Task) -> Orders:
    """DualPipeV (DeepSeek-AI, 2025): two stages per rank, placed in a V; M >= 2P.

    Bubble (P-1)(F&B + B - 3W) per stage, B being both halves; holds 2P+1 stages.

    Raises:
        ConfigError: there are fewer microbatches than 2P.
    """
    ranks, total = task.num_ranks, task.num_microbatches
    if total < 2 * ranks and not task.forward_only:
        raise ConfigError(_too_few("dualpipe_v", total, ranks))
    padded = max(total, 2 * ranks)
    return [
        only_microbatches(
            _DualRank(rank, ranks, task.chunks(rank), (range(padded), range(padded))).order(), total
        )
        for rank in range(ranks)
    ]


def dualpipe(task: Task) -> Orders:
    """Bubble (P/2-1)(F&B + B - 3W); each of the two copies holds P+1 microbatches of its stage.

    P and M even, M >= 2P. DualPipeV has the same bubble with one copy on half the ranks.

    Raises:
        ConfigError: P or M is odd, or M is less than 2P.
    """
    ranks, total = task.num_ranks, task.num_microbatches
    if ranks % 2:
        raise ConfigError(
            Mistake(
                f"dualpipe needs an even number of pipeline ranks, not {ranks}",
                works=(
                    *nearest_choices(
                        "--pipeline-model-parallel-size", (n for n in (ranks - 1, ranks + 1) if n)
                    ),
                    "dualpipe_v",
                ),
            )
        )
    if not task.forward_only and total % 2:
        raise ConfigError(
            Mistake(
                f"dualpipe sends half of the microbatches each way, {total} is odd",
                works=tuple(nearest_choices("number of microbatches", (total - 1, total + 1))),
            )
        )
    if not task.forward_only and total < 2 * ranks:
        raise ConfigError(_too_few("dualpipe", total, ranks))
    return [_bidirectional(task, rank) for rank in range(ranks)]


def _bidirectional(task: Task, rank: int) -> list[Act]:
    ranks, total = task.num_ranks, task.num_microbatches
    here, there = task.chunks(rank)
    if task.forward_only:
        return [Act(Kind.F, here if 2 * mb < total else there, mb) for mb in range(total)]
    ways = [(here, range(total // 2)), (there, range(total // 2, total))]
    if rank >= ranks // 2:
        ways.reverse()
    stages, mbs = zip(*ways, strict=True)
    return _DualRank(min(rank, ranks - 1 - rank), ranks // 2, stages, mbs).order()


def _too_few(name: str, total: int, ranks: int) -> Mistake:
    return Mistake(
        f"{name} over {ranks} ranks needs at least {2 * ranks} microbatches, not {total}",
        (f"2 x {ranks} (ranks) = {2 * ranks}",),
        (f"number of microbatches {2 * ranks}", "zb_v" if name == "dualpipe_v" else "zb_h1"),
    )


class _DualRank:
    """The actions of one rank, `rank` hops from the end where direction 0 enters.

    Args:
        rank: index of the rank in its half of the ranks (in a V: among all ranks).
        ranks: number of ranks in that half.
        stages: stages of directions 0 and 1.
        microbatches: microbatches of directions 0 and 1.
    """

    def __init__(
        self, rank: int, ranks: int, stages: tuple[int, ...], microbatches: tuple[range, ...]
    ) -> None:
        self._rank, self._ranks = rank, ranks
        each = list(zip(stages, microbatches, strict=True))
        self._total = sum(len(mbs) for mbs in microbatches) // 2
        self._forwards = [deque(Act(Kind.F, stage, mb) for mb in mbs) for stage, mbs in each]
        self._backwards = [deque(Act(Kind.BW, stage, mb) for mb in mbs) for stage, mbs in each]
        self._pending: deque[Act] = deque()
        self._acts: list[Act] = []

    def order(self) -> list[Act]:
        """The eight phases."""
        rank, before = self._rank, self._ranks - self._rank - 1
        for _ in range(2 * before):
            self._forward(0)
        for _ in range(rank + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(before):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for step in range(self._total - 2 * self._ranks + rank + 1):
            if step == 0 and before == 0:  # not overlapped: the ranks before wait for this dX
                self._forward(0)
                self._backward(1)
            else:
                self._overlapped(0, 1)
            self._overlapped(1, 0)
        for _ in range(before):
            self._backward(1)
            self._overlapped(1, 0)
        for half in range(2 * (rank + 1)):
            self._backward(1 - half % 2, split=half > rank)
        for _ in range(before):
            self._weight()
            self._backward(0, split=True)
        return [*self._acts, *self._pending]

    def _forward(self, way: int) -> None:
        self._acts.append(self._forwards[way].popleft())

    def _backward(self, way: int, *, split: bool = False) -> None:
        act = self._backwards[way].popleft()
        if split:
            self._acts.append(Act(Kind.B, act.stage, act.mb))
            self._pending.append(Act(Kind.W, act.stage, act.mb))
        else:
            self._acts.append(act)

    def _weight(self) -> None:
        self._acts.append(self._pending.popleft())

    def _overlapped(self, forward_way: int, backward_way: int) -> None:
        forward = self._forwards[forward_way].popleft()
        self._acts.append(pair(forward, self._backwards[backward_way].popleft()))
