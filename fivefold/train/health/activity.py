"""What the main thread of a rank is doing, for other threads to read. Imports no torch."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

from fivefold.pipeline.ir import COMPUTE, Act, Direction, Kind, Message


class Mark(Protocol):
    """A point in a device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from here to a later mark, once the device has reached both."""
        ...


class Activity:
    """The step and the pipeline action of this rank, kept at the cost of a few assignments.

    Attributes:
        step: the step under way, from 1; 0 before the first.
        act: the pipeline action that the host is in; None outside of the stages' program.
        mark: function that marks a place in the device's work; None where the host does the work.
    """

    def __init__(self) -> None:
        self.step = 0
        self.act: Act | None = None
        self.mark: Callable[[], Mark] | None = None
        self._since = time.monotonic()
        self._received: list[Message] = []
        self._entered: list[tuple[Act | None, float, Mark | None]] = []

    @property
    def idle_seconds(self) -> float:
        """Seconds since the main thread began its step or its pipeline action."""
        return time.monotonic() - self._since

    def begin(self, step: int) -> None:
        """Note that a step begins."""
        self.step, self.act = step, None
        self._received, self._entered = [], []
        self._since = time.monotonic()

    def enter(self, act: Act | None) -> None:
        """Note that an action begins, that its messages have arrived, or that all actions are
        done."""
        self.act, self._since = act, time.monotonic()
        self._entered.append((act, self._since, self.mark() if self.mark else None))
        if act is not None and act.kind is Kind.RECV and act.message is not None:
            self._received.append(act.message)

    @property
    def device_act(self) -> Act | None:
        """The latest computing action that the device has begun; None where the host computes."""
        for act, _, mark in reversed(self._entered):
            if act is not None and act.kind in COMPUTE and mark is not None and mark.query():
                return act
        return None

    @property
    def compute_seconds(self) -> float:
        """Seconds that the device spent on the step's computing actions, without waits for
        messages; known once it is done."""
        total = 0.0
        for (act, began, mark), (following, ended, after) in pairwise(self._entered):
            if act is None or act.kind not in COMPUTE or act is following:
                continue
            total += ended - began if mark is None else mark.elapsed_time(after) / 1e3
        return total

    @property
    def needs(self) -> str:
        """The messages that the current action needs from other pipeline ranks."""
        needed = set()
        for act in () if self.act is None else self.act.elementary:
            direction = Direction.FORWARD if act.kind is Kind.F else Direction.BACKWARD
            needed.add((direction, act.stage, act.mb, act.slice))
        return " and ".join(
            f"the {m.direction} message of microbatch {m.mb} from stage {m.src_stage} "
            f"on PP({m.src_rank})"
            for m in self._received
            if (m.direction, m.dst_stage, m.mb, m.slice) in needed
        )

    def __str__(self) -> str:
        said = f"step {self.step}" if self.step else "before the first step"
        if self.act is not None:
            said += f", {self.act}"
        device = self.device_act
        return said if device is None else f"{said}; its GPU is in {device}"
