"""Interleaves a forward and a backward, so that each computes while the other communicates.

DualPipe (DeepSeek-AI, 2024) and Megatron-LM's combined 1F1B split both halves into pieces by hand.
Here each half is an ordinary call on its own thread, and only one of them runs at any time: where
it would wait for a message, it switches to the other. The order in which operations are issued
depends only on the number of messages, so it is the same on all ranks that communicate.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Semaphore

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class OtherHalfFailed(Exception):
    """Ends one half of a pair after the other has failed."""


class Interleaver:
    """Interleaves two functions on one rank.

    Args:
        device: device whose current stream both halves use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._helper = ThreadPoolExecutor(1, "second half of pairs")
        self._pair: _Pair | None = None

    def give_way(self) -> None:
        """Let the other half run until it gives way or ends; without a pair, do nothing.

        Raises:
            OtherHalfFailed: the other half has failed.
        """
        if self._pair is not None:
            self._pair.give_way()

    def run(
        self,
        first: Callable[[], None],
        second: Callable[[], None],
        between: Callable[[], None] | None = None,
    ) -> None:
        """Run both functions alternately: `first` until it gives way, then `second`, and so on.

        Args:
            first: half that runs on the calling thread.
            second: half that runs on its own thread.
            between: function that `first` calls each time before it gives way; None: nothing.

        Raises:
            Exception: the exception of the half that failed.
        """
        pair = self._pair = _Pair(between)
        future = self._helper.submit(pair.run_second, self._alike(second))
        try:
            pair.run(first)
        except OtherHalfFailed:
            pass  # the helper's error is the cause
        finally:
            self._pair = None
            failure = future.exception()
        if failure is not None and not isinstance(failure, OtherHalfFailed):
            raise failure

    def _alike(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function, run with the calling thread's PyTorch state.

        That is gradient mode, dispatch modes and the current CUDA stream.
        """
        enabled, modes = torch.is_grad_enabled(), _get_current_dispatch_mode_stack()
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if cuda else None

        def run() -> None:
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(enabled))
                if stream is not None:
                    stack.enter_context(torch.cuda.device(self._device))
                    stack.enter_context(torch.cuda.stream(stream))
                for mode in modes:
                    stack.enter_context(mode)
                function()

        return run


class _Pair:
    """Two halves, of which one runs at a time: half 0 is the first, half 1 the second."""

    def __init__(self, between: Callable[[], None] | None) -> None:
        self._between = between
        self._turns = Semaphore(0), Semaphore(0)
        self._running = 0
        self._both = True  # neither has ended
        self._failed = False

    def give_way(self) -> None:
        me = self._running
        if me == 0 and self._between is not None:
            self._between()
        if self._failed:
            raise OtherHalfFailed
        if self._both:
            self._pass_on()
            self._turns[me].acquire()
            if self._failed:
                raise OtherHalfFailed

    def run_second(self, function: Callable[[], None]) -> None:
        self._turns[1].acquire()
        if self._failed:
            raise OtherHalfFailed
        self.run(function)

    def run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException:
            self._failed = True
            raise
        finally:
            if self._both:
                self._both = False
                self._pass_on()

    def _pass_on(self) -> None:
        self._running = 1 - self._running
        self._turns[self._running].release()
