"""Records when each pipeline action of a step runs, to compare with the simulator."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fivefold.mesh.collectives import gather_objects
from fivefold.pipeline.costs.measured import MeasuredAct
from fivefold.pipeline.ir import Act

Instant = Callable[[], float]
"""A time in seconds that can be read once the device has reached it."""


class Recorder:
    """An `executor.Observer` that times one step of one pipeline; create it right before the step.

    On a GPU it records events, without synchronising. Ranks on one machine share its clock; ranks
    on several machines take the moment at which all have met as a common zero.

    Args:
        group: pipeline group, all of whose ranks must record; None for one rank.
        device: device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._acts: list[tuple[Act, Instant, Instant]] = []
        here = (socket.gethostname(), time.perf_counter())
        met = gather_objects(here, group)
        self._zero = max(clock for host, clock in met if host == here[0])
        self._base: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record()
        self._late = time.perf_counter() - self._zero

    @contextmanager
    def __call__(self, act: Act) -> Iterator[None]:
        """Time what runs in the block as `act`."""
        start = self._now()
        yield
        self._acts.append((act, start, self._now()))

    def gather(self) -> list[MeasuredAct]:
        """The actions of all ranks; every rank calls this after the step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        rank = 0 if self._group is None else self._group.rank()
        own = [
            MeasuredAct(rank, str(kid.kind), kid.stage, kid.mb, start(), end(), kid.slice, kid.part)
            for act, start, end in self._acts
            for kid in act.elementary
        ]
        return [act for acts in gather_objects(own, self._group) for act in acts]

    def _now(self) -> Instant:
        base = self._base
        if base is None:
            seconds = time.perf_counter() - self._zero
            return lambda: seconds
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return lambda: self._late + base.elapsed_time(event) / 1000
