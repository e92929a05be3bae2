"""The flex dispatcher with kernels of the package DeepEP (github.com/deepseek-ai/DeepEP).

Its `Buffer` sends a token once to every rank that holds one of its experts (dispatch), and sums
the results (combine); the backward of each is the other. Shapes as in `dispatch`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import ConfigError
from fivefold.expert.dispatch import run_chosen
from fivefold.model.moe.layer import Beside, RunExperts
from fivefold.model.moe.routing import ExpertChoice


@dataclass
class Kernels:
    """DeepEP's kernels on one rank, with their communication buffer, allocated on first use.

    Attributes:
        ep: expert-parallel group.
        num_sms: even number of multiprocessors that a kernel uses.
        package: module deep_ep.
    """

    ep: dist.ProcessGroup
    num_sms: int
    package: ModuleType = field(default_factory=lambda: _imported())
    _buffer: Any = None

    def buffer(self, x: Tensor) -> Any:
        """The buffer for tokens and gradients with as many features as `x`, [T, H]."""
        if self._buffer is None:
            kind, ranks = self.package.Buffer, self.ep.size()
            kind.set_num_sms(self.num_sms)
            row = x.shape[1] * max(x.element_size(), 2)
            configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
            self._buffer = kind(
                self.ep,
                max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs),
                max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs),
            )
        return self._buffer


@dataclass(frozen=True)
class DeepEPDispatch:
    """Sends a token once to every rank that holds one of its experts, with DeepEP's kernels.

    Attributes:
        kernels: DeepEP's kernels on this rank.
        etp: group of ranks that split each expert; None: one rank.
        meanwhile: function called before waiting for rows, forward and backward; None: nothing.
    """

    kernels: Kernels
    etp: dist.ProcessGroup | None
    meanwhile: Callable[[], None] | None

    def __call__(
        self,
        x_TH: Tensor,
        choice: ExpertChoice,
        run: RunExperts,
        beside: tuple[Beside, Beside] | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]."""
        ranks, room = self.kernels.ep.size(), choice.padded_ranks_to
        trip = _RoundTrip(self.kernels.buffer(x_TH), choice, ranks, self.meanwhile)
        first, second = beside or (None, None)
        wide = torch.promote_types(x_TH.dtype, torch.float32)  # fp32 for bf16
        x, weights_RK = trip.there(x_TH, choice.weights_TK.to(wide), first)
        experts_RK, here = trip.experts_RK, choice.num_experts // ranks
        total = None if room is None else ranks * room
        kept_RK = experts_RK >= 0
        experts_RK = experts_RK.masked_fill(~kept_RK, here)
        got = ExpertChoice(experts_RK, weights_RK, kept_RK, here, padded_ranks_to=total)
        y = run_chosen(x, got, run, self.etp, trip.copies)
        return trip.back(y, second)


Launched = tuple[tuple[Tensor, ...], Any]
"""Outputs of a launched kernel, and the event after which they may be read."""


class _RoundTrip:
    """Dispatch and combine of one forward's tokens, and of their gradients.

    Attributes:
        experts_RK: experts of every received row, int64: indices local to this rank, -1 for experts
            of other ranks; set by `there`.
        copies: number of received choices of this rank's experts; None: unknown to the host.
    """

    experts_RK: Tensor
    copies: int | None = None

    def __init__(
        self, buffer: Any, choice: ExpertChoice, ranks: int, meanwhile: Callable[[], None] | None
    ) -> None:
        self._buffer, self._choice, self._ranks = buffer, choice, ranks
        self._meanwhile = meanwhile
        self._handle: Any = None

    def there(
        self, x_TH: Tensor, weights_TK: Tensor, beside: Beside | None
    ) -> tuple[Tensor, Tensor]:
        """[T, H] tokens and their weights -> the received rows and their weights."""
        kernel = _Kernel(self._dispatch, self._combine, self._meanwhile)
        x, weights_RK = _fly((x_TH, weights_TK), kernel, beside)
        return x, weights_RK

    def back(self, y: Tensor, beside: Beside | None) -> Tensor:
        """Results of the rows -> [T, H] sum of each token's results."""
        kernel = _Kernel(self._combine, self._dispatch_again, self._meanwhile)
        return _fly((y,), kernel, beside)[0]

    def _when(self) -> dict[str, Any]:
        """Arguments of a kernel that waits for earlier computation, and for which nothing waits."""
        event = self._buffer.capture()
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}

    def _dispatch(self, x_TH: Tensor, weights_TK: Tensor) -> Launched:
        choice, room = self._choice, self._choice.padded_ranks_to
        x_TH, experts_TK = x_TH.contiguous(), choice.experts_TK
        if choice.kept_TK is not None:
            experts_TK = experts_TK.masked_fill(~choice.kept_TK, -1)
        when = self._when()  # last: the kernels wait for nothing that is launched afterwards
        *layout, event = self._buffer.get_dispatch_layout(experts_TK, choice.num_experts, **when)
        each_rank, each_rdma_rank, each_expert, in_rank = layout
        x, self.experts_RK, weights_RK, copies_e, self._handle, event = self._buffer.dispatch(
            x_TH,
            num_tokens_per_rank=each_rank,
            num_tokens_per_rdma_rank=each_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=each_expert,
            topk_idx=experts_TK,
            topk_weights=weights_TK,
            num_worst_tokens=0 if room is None else self._ranks * min(room, len(x_TH)),
            **{**when, "previous_event": event},
        )
        self.copies = sum(copies_e) if room is None else None
        return (x, weights_RK), event

    def _combine(self, y: Tensor, weights_RK: Tensor | None = None) -> Launched:
        x_TH, weights_TK, event = self._buffer.combine(
            y.contiguous(),
            self._handle,
            topk_weights=None if weights_RK is None else weights_RK.contiguous(),
            **self._when(),
        )
        return (x_TH,) if weights_RK is None else (x_TH, weights_TK), event

    def _dispatch_again(self, grad_TH: Tensor) -> Launched:
        """Send gradients to the rows of their tokens."""
        grad, *_, event = self._buffer.dispatch(
            grad_TH.contiguous(), handle=self._handle, **self._when()
        )
        return (grad,), event


Launch = Callable[..., Launched]
"""Function that launches a kernel that sends tensors."""


def _fly(
    tensors: tuple[Tensor, ...], kernel: "_Kernel", beside: Beside | None
) -> tuple[Tensor, ...]:
    """Send tensors, and gradients in the backward, in parallel to a computation.

    Args:
        tensors: tensors to send.
        kernel: kernel that sends them.
        beside: computation that runs during the transfer; None: nothing.
    """
    started = _LaunchKernel.apply(kernel, *tensors)
    if beside is not None:
        beside()
    landed: tuple[Tensor, ...] = _WaitKernel.apply(kernel, *started)
    return landed


class _Kernel:
    """A kernel that sends tensors, and the one that sends their gradients.

    Args:
        forward_kernel: launches the kernel of the forward.
        backward_kernel: launches the kernel of the backward.
        meanwhile: function called before waiting for either; None: nothing.
    """

    def __init__(
        self, forward_kernel: Launch, backward_kernel: Launch, meanwhile: Callable[[], None] | None
    ) -> None:
        self.forward_kernel, self.backward_kernel = forward_kernel, backward_kernel
        self._meanwhile = meanwhile
        self._launched: Launched | None = None

    def launch(self, kernel: Launch, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Launch one of the two kernels; its outputs are complete after `wait`."""
        self._launched = kernel(*tensors)
        return self._launched[0]

    def wait(self) -> tuple[Tensor, ...]:
        """Outputs of the last launch; later work on the current stream waits for them."""
        if self._meanwhile is not None:
            self._meanwhile()
        assert self._launched is not None
        (tensors, event), self._launched = self._launched, None
        event.current_stream_wait()
        return tensors


class _LaunchKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kernel = kernel
        kernel.launch(kernel.forward_kernel, tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.kernel.wait()
        return None, *grads


class _WaitKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.kernel = kernel
        return kernel.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.kernel.launch(ctx.kernel.backward_kernel, grads)


def _imported() -> ModuleType:
    try:
        return importlib.import_module("deep_ep")
    except (ImportError, OSError) as error:  # a CUDA or NVSHMEM library is missing
        raise ConfigError(f"DeepEP (moe_enable_deepep) cannot be loaded: {error}") from error
