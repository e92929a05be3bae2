"""A forward and a backward that run beside each other, so that experts' messages are hidden.

DualPipe (DeepSeek-AI, 2024, figure 4) and Megatron-LM's combined 1F1B order a pair so that each
half's all-to-alls run beside the other half's computation, or beside dW, for which nothing waits.
A half without a partner, in the warm-up and the drain, hides nothing.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.hardware import Gpu
from fivefold.pipeline.costs import Costs
from fivefold.predict.stage_times import Times

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", float, NDArray[np.float64])


@dataclass(frozen=True)
class Paired:
    """What of a stage takes part in pairs: its layers, not the embedding and the head.

    Attributes:
        layers: their times, with nothing hidden.
        host: seconds in which the host issues their forwards; backwards take twice that.
    """

    layers: Times
    host: float


def pair_seconds(
    gpu: Gpu, costs: Costs, kinds: Sequence[K], layers: Mapping[K, Paired]
) -> tuple[tuple[float, ...], ...]:
    """Seconds of each stage's forward beside each stage's backward, as `Costs.fb` has them.

    Args:
        gpu: GPU that computes.
        costs: costs of each half alone.
        kinds: kinds of the stages; those of a kind take the same time.
        layers: layers of each kind.
    """
    at = {kind: stage for stage, kind in enumerate(kinds)}

    def row(ours: K) -> tuple[float, ...]:
        alone = costs.f[at[ours]]
        seconds = {
            theirs: alone + costs.b[s] + costs.w[s] - hidden(gpu, layers[ours], layers[theirs])
            for theirs, s in at.items()
        }
        return tuple(seconds[kind] for kind in kinds)

    rows = {kind: row(kind) for kind in at}
    return tuple(rows[kind] for kind in kinds)


def hidden(gpu: Gpu, forward: Paired, backward: Paired) -> float:
    """Seconds by which a pair is shorter than its halves in turn.

    It is not shorter than the host takes to issue both.
    """
    ahead, back = forward.layers, backward.layers
    beside = min(cuts(ahead.work.forward, back.work.dx, back.work.dw, ahead.ep.forward, back.ep.dx))
    alone = ahead.total.forward + back.total.dx + back.total.dw
    host = forward.host + 2 * backward.host
    return max(0.0, min((1 - gpu.overlap_slowdown) * beside, alone - host))


def cuts(forward: V, dx: V, dw: V, sent: V, returned: V) -> tuple[V, V, V, V]:
    """Limits on how much of a pair's messages can lie beside its computation.

    The forward's messages may lie beside dX and dW, the backward's beside the forward and dW. The
    largest flow from one to the other is the smallest cut between them (Ford and Fulkerson, 1956).

    Args:
        forward: seconds of its computation; one number each, or arrays of them.
        dx: time of the backward's computation.
        dw: time of the weights' gradients.
        sent: time of the forward's messages.
        returned: time of the backward's messages.
    """
    return sent + returned, sent + forward + dw, dx + dw + returned, forward + dx + dw
