"""Zero-bubble schedules: W fills the bubble (Qi et al., Zero Bubble Pipeline Parallelism, 2023).

The backward pass is split into B, which the previous rank waits for, and W, which nobody waits for.
"Zero" holds for the span of one rank, not for a step that ends with a global operation.
"""

from collections import deque
from itertools import chain

from fivefold.pipeline.ir import Act, Kind
from fivefold.pipeline.schedules.fixed import (
    Orders,
    Task,
    check_groups,
    interleaved,
    only_microbatches,
)


def zb_h1(task: Task) -> Orders:
    """1F1B's warm-up and memory, with the W's of rank r lagging r behind their B's.

    Bubble max((P-1)(F+B-W), (P-1)F); every rank holds P microbatches. Any M.
    """
    return [
        _lagging(
            [Act(Kind.F, rank, mb) for mb in range(task.num_microbatches)],
            [Act(Kind.B, rank, mb) for mb in range(task.num_microbatches)],
            warm_up=task.num_ranks - 1 - rank,
            lag=rank,
        )
        for rank in range(task.num_ranks)
    ]


def zb_h2(task: Task) -> Orders:
    """No bubble in the span if F = B = W, at about twice the memory of ZB-H1.

    Span bubble max(0, (P-1)(F+B-2W)), flush bubble at least (P-1)F; holds 2P-1 microbatches.
    """
    orders = []
    for rank in range(task.num_ranks):
        mbs = range(task.num_microbatches)
        forwards = deque(Act(Kind.F, rank, mb) for mb in mbs)
        weights = deque(Act(Kind.W, rank, mb) for mb in mbs)
        warm_up = min(2 * (task.num_ranks - 1 - rank) + 1, task.num_microbatches)
        order = [forwards.popleft() for _ in range(warm_up)]
        for mb in mbs:
            order.append(Act(Kind.B, rank, mb))
            if mb >= 2 * rank:
                order.append(weights.popleft())
            if forwards:
                order.append(forwards.popleft())
        orders.append([*order, *weights])
    return orders


def interleaved_zb(task: Task) -> Orders:
    """ZB-H1 with several stages per rank, depth-first in groups.

    Flush bubble (P-1)F/V; at V=2 rank 0 holds P microbatches. P <= G <= M.
    """
    check_groups(task)
    return [
        _lagging(
            *interleaved(task, rank, Kind.B),
            warm_up=task.num_ranks - 1 - rank + (len(task.chunks(rank)) - 1) * task.group_size,
            lag=rank,
        )
        for rank in range(task.num_ranks)
    ]


def zb_v(task: Task) -> Orders:
    """Two stages per rank in a V, at the memory of 1F1B.

    No bubble in the span if F = B = W; flush bubble (P-1)F/2; holds 2P stages. Any M.
    """
    total = max(task.num_microbatches, 2 * task.num_ranks - 1)
    return [
        only_microbatches(_zb_v_rank(task, rank, total), task.num_microbatches)
        for rank in range(task.num_ranks)
    ]


def _zb_v_rank(task: Task, rank: int, total: int) -> list[Act]:
    ranks = task.num_ranks
    streams = {
        f"{kind}{chunk}": deque(Act(kind, stage, mb) for mb in range(total))
        for kind in (Kind.F, Kind.B, Kind.W)
        for chunk, stage in enumerate(task.chunks(rank))
    }
    order: list[Act] = []

    def run(names: str, times: int) -> None:
        for name in names.split() * times:
            order.append(streams[name].popleft())

    run("F0", 2 * (ranks - rank) - 1)
    run("F1 F0", rank)
    run("F1 B1 W1", ranks - rank)
    while streams["F1"]:
        run("F0", min(1, len(streams["F0"])))
        run("B0 W0 F1 B1 W1", 1)
    run("B0 B1", rank)
    run("B0 W0", ranks - rank)
    return [*order, *streams["W1"], *streams["W0"]]


def _lagging(forwards: list[Act], inputs: list[Act], warm_up: int, lag: int) -> list[Act]:
    """`warm_up` forwards, then F, B and, once `lag` are pending, the oldest W."""
    order, pending = forwards[:warm_up], deque[Act]()
    for forward, act in zip(chain(forwards[warm_up:], [None] * warm_up), inputs, strict=False):
        if forward:
            order.append(forward)
        order.append(act)
        pending.append(Act(Kind.W, act.stage, act.mb))
        if len(pending) > lag:
            order.append(pending.popleft())
    return [*order, *pending]
