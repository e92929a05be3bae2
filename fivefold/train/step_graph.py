"""The forwards and backwards of a whole step as one CUDA graph, which the host launches at once.

What a graph replays are the same kernels on the same memory. So the batches and the scale of the
loss are copied to where the recorded step read them, and the gradients are where it left them;
every other number that a step hands to a kernel must be the same in each (`config.rules.graph`).
"""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fivefold.model.batch import Batch, FixedBatches, form, on_device
from fivefold.parallel_model import ParallelModel
from fivefold.pipeline.ir import Program
from fivefold.pipeline.run.executor import StepSums

WARMUP = 2
"""Steps of a form before it is recorded: the first one makes what is made once, and the second one
shows compilers what a step finds that is not the first."""

T = TypeVar("T")


class StepRecorder(Protocol):
    """Runs work, and can run it again without the host's part."""

    def run(self, work: Callable[[], T]) -> T:
        """Do the work now, in the way `record` will later."""

    def record(self, work: Callable[[], Sequence[Tensor]], streams: Sequence[Any]) -> "Replay":
        """Record the work, which need not be done.

        Args:
            work: what is recorded; all that it makes and that is read later, it returns.
            streams: further streams that it may use.
        """


Replay = Callable[[], None]
"""Does recorded work again: it reads and writes the same memory."""


class CudaRecorder:
    """Records the kernels launched on a stream as a CUDA graph.

    Each graph has memory of its own: a run has one, or one for each number of microbatches.

    Args:
        device: GPU of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, work: Callable[[], T]) -> T:
        """Do the work on the recording stream, since autograd remembers where tensors were made."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            done = work()
        here.wait_stream(self._stream)
        return done

    def record(self, work: Callable[[], Sequence[Tensor]], streams: Sequence[Any]) -> Replay:
        """Capture the work; other threads may use the device meanwhile."""
        gc.collect()  # free garbage now, since nothing may be freed during the capture
        graph, mode = torch.cuda.CUDAGraph(), "thread_local"
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)  # orders streams; nothing computes before a replay
        # It waits for the device, and empties the allocator's cache.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode=mode):
            # FSDP2 makes its streams wait for this one, and waits for some of them only.
            for stream in streams:
                stream.wait_stream(self._stream)
            work()
            for stream in streams:
                self._stream.wait_stream(stream)
        here.wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True)
class _Recorded:
    """A step that can be replayed, with the memory that it reads and writes."""

    batches: FixedBatches
    scale: Tensor
    sums: StepSums
    gradients: Sequence[tuple[nn.Parameter, Tensor]]
    replay: Replay


class StepGraphs:
    """Runs the forwards and backwards of steps, and completes their gradients.

    A step of a form that was recorded is replayed. Whoever watches a step from within says so by
    `eagerly`: no code of the model runs in a replay.

    Args:
        model: this rank's part of the model.
        device: where it lives.
        recorder: what records steps; None: every step is launched kernel by kernel.

    Attributes:
        replayed: how many steps were replays.
    """

    def __init__(
        self, model: ParallelModel, device: torch.device, recorder: StepRecorder | None
    ) -> None:
        self._model, self._device, self._recorder = model, device, recorder
        self._steps: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recorded] = {}
        self.replayed = 0

    def run(self, program: Program, batches: Sequence[Batch], scale: Tensor) -> StepSums:
        """Leave the complete gradient of a step on the parameters, which must have none before.

        Args:
            program: lowered.
            batches: batches of the step, still on the host.
            scale: as `Executor.run` takes it.
        """
        if self._recorder is None:
            return self._launch(program, on_device(batches, self._device), scale)
        kind = program.num_microbatches, form(batches)
        recorded = self._recorded.get(kind)
        if recorded is None and self._steps[kind] < WARMUP:
            self._steps[kind] += 1
            there = on_device(batches, self._device)
            return self._recorder.run(partial(self._launch, program, there, scale))
        if recorded is None:
            recorded = self._recorded[kind] = self._record(self._recorder, program, batches, scale)
        else:
            recorded.batches.fill(batches)
            recorded.scale.copy_(scale)
        recorded.replay()
        for parameter, gradient in recorded.gradients:
            parameter.grad = gradient
        self.replayed += 1
        return recorded.sums

    def release(self) -> None:
        """Drop the recorded graphs: they free their memory and release NCCL's groups, whose
        destruction would otherwise wait for them."""
        self._recorded.clear()

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Launch the steps of the block kernel by kernel; graphs give their memory back first."""
        recorder, self._recorder = self._recorder, None
        self.release()
        try:
            yield
        finally:
            self._recorder = recorder

    def _launch(self, program: Program, batches: Sequence[Batch], scale: Tensor) -> StepSums:
        sums = self._model.run(program, batches, scale)
        self._model.finish_gradients()
        return sums

    def _record(
        self, recorder: StepRecorder, program: Program, batches: Sequence[Batch], scale: Tensor
    ) -> _Recorded:
        there, scale = FixedBatches(batches, self._device), scale.clone()
        parameters = self._model.parameters().values()
        assert all(parameter.grad is None for parameter in parameters), "these would be added to"
        made: list[StepSums] = []

        def work() -> Sequence[Tensor]:
            sums = self._launch(program, there.batches, scale)
            made.append(sums)
            grads = (p.grad for p in parameters if p.grad is not None)
            return sums.loss, sums.z_loss, sums.noted, *sums.routing.values(), *grads

        with self._unwatched():
            replay = recorder.record(work, self._settled())
        self._settled()  # the capture's events must not be waited for outside of it
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        return _Recorded(there, scale, made[0], gradients, replay)

    def _settled(self) -> list[Any]:
        """Free gathered parameters and forget events; return the streams beside the computing
        one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [stream for each in self._model.gradients.values() for stream in each.settle()]

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Do not report actions as they begin: the event that marks one would become part of the
        capture."""
        executor = self._model.executor
        enter, executor.enter = executor.enter, lambda act: None
        try:
            yield
        finally:
            executor.enter = enter
