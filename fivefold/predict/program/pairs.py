"""Predicts the time of a forward paired with a backward, which hides the messages of experts.

DualPipe (DeepSeek-AI, 2024, figure 4) and Megatron-LM's combined 1F1B order a pair so that the
all-to-alls of each half run in parallel to the computation of the other half, or to a delayed dW,
on which nothing depends. A half without a partner, in the warm-up and the drain, hides nothing.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from fivefold.hardware import Gpu
from fivefold.pipeline.costs.costs import Costs
from fivefold.predict.times.compute import greater, lesser
from fivefold.predict.times.stage import Times

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Paired:
    """The layers of a stage, which take part in pairs; the embedding and the head do not.

    Attributes:
        layers: times of the layers, with nothing hidden.
        host: seconds in which the host issues their forwards; backwards take twice that.
    """

    layers: Times
    host: float


def pair_seconds(
    gpu: Gpu, costs: Costs, kinds: Sequence[K], layers: Mapping[K, Paired], *, delays: bool
) -> tuple[tuple[float, ...], ...]:
    """Seconds of each stage's forward paired with each stage's backward, for `Costs.fb`.

    Args:
        gpu: the GPU.
        costs: times of each half alone.
        kinds: kinds of the stages; stages of the same kind take the same time.
        layers: layers of each kind of stage.
        delays: whether dW waits until the backward's own messages travel.
    """
    at = {kind: stage for stage, kind in enumerate(kinds)}

    def row(ours: K) -> tuple[float, ...]:
        alone = costs.f[at[ours]]
        seconds = {
            theirs: alone
            + costs.b[s]
            + costs.w[s]
            - hidden(gpu, layers[ours], layers[theirs], delays=delays)
            for theirs, s in at.items()
        }
        return tuple(seconds[kind] for kind in kinds)

    rows = {kind: row(kind) for kind in at}
    return tuple(rows[kind] for kind in kinds)


def hidden(gpu: Gpu, forward: Paired, backward: Paired, *, delays: bool) -> float:
    """Seconds that a pair saves compared with its halves in turn.

    A pair cannot take less time than the host needs to issue both halves; what each half alone
    waits for it is part of that. A dW that is not delayed runs with its dX, so that only the
    forward's messages can travel in parallel to it.
    """
    ahead, back = forward.layers, backward.layers
    dx, dw = back.work.dx, back.work.dw
    if not delays:
        dx, dw = dx + dw, 0.0
    sent, returned, work = ahead.ep.forward, back.ep.dx, ahead.work.forward
    # The forward's messages can run in parallel to dX and dW, the backward's to the forward and dW.
    # The most that can be hidden is a maximum flow, and equals the smallest of these cuts (Ford and
    # Fulkerson, 1956).
    cuts = (sent + returned, sent + work + dw, dx + dw + returned, work + dx + dw)
    beside = reduce(lesser, cuts)
    alone = ahead.total.forward + back.total.dx + back.total.dw
    waited = ahead.host.forward + back.host.dx + back.host.dw
    host = forward.host + 2 * backward.host
    return greater(lesser((1 - gpu.overlap_slowdown) * beside + waited, alone - host), 0.0)
