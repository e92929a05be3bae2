"""What a rehearsed rank did in its step: its messages in order, and its needs; torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass

WORKING, MESSAGES, ACTIVATIONS = "working set", "messages", "activations"
WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"


@dataclass(frozen=True, slots=True)
class Issued:
    """One operation of torch.distributed that a rank issued.

    Attributes:
        op: name of the operation, as in `audit.calls.Call`.
        group: name of the group.
        size: bytes of the whole buffer, or of the message.
        dtype: type of its numbers.
        sent: bytes that this rank sends.
        peer: rank in the group of a message; None for collectives.
        tag: number of a message.
        parts: bytes that an all-to-all sends to each rank, and receives; else empty.
    """

    op: str
    group: str
    size: int
    dtype: str
    sent: float
    peer: int | None
    tag: int
    parts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Script:
    """One rank's step.

    Attributes:
        rank: number of the rank.
        groups: ranks of each group that it made, by the group's name, in the order of their making.
        axes: mesh axis of each group name.
        issued: operations of torch.distributed, in order.
        peak: most bytes held at once.
        peak_at: pipeline action at which the peak occurs.
        held: bytes of each category at the peak.
        operations: operations that launch work.
        waits: times that the host reads a number off the device while the step still runs.
        sent: bytes that theory says this rank sends, by mesh axis.
        acts: number of pipeline actions that compute.
        repeated: those of them that were counted instead of run.
        seconds: time that the rehearsal of the rank took.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, str]
    issued: tuple[Issued, ...]
    peak: int
    peak_at: str
    held: Mapping[str, int]
    operations: int
    waits: int
    sent: Mapping[str, float]
    acts: int
    repeated: int
    seconds: float

    def by_axis(self) -> dict[str, float]:
        """Bytes sent by mesh axis, counted call by call."""
        total: dict[str, float] = {}
        for call in self.issued:
            axis = self.axes.get(call.group, call.group)
            total[axis] = total.get(axis, 0.0) + call.sent
        return {axis: size for axis, size in total.items() if size}
