"""The result of a step, on the device and on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from fivefold.optim.schedule import StepRates
from fivefold.train.metrics import LayerRouting


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    Attributes:
        loss: mean over the global batch's valid tokens.
        grad_norm: norm of the global gradient before clipping; NaN, too, if a parameter or a copy
            of a gradient is not finite on any rank.
        lr: learning rate that the step was taken with.
        tokens: valid tokens of the global batch.
        votes: how many ranks asked to stop after this step.
        extra: further numbers by name, for the metrics; the losses of multi-token prediction, the
            part of `loss` that is z-loss, and the loss scale.
        routing: what routers decided, of each layer with experts.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    votes: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)
    routing: tuple[LayerRouting, ...] = ()

    @property
    def loss_scale(self) -> float | None:
        """The factor of gradients while they were computed; None except in fp16."""
        return self.extra.get("loss_scale")

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are numbers."""
        return isfinite(self.loss) and isfinite(self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether the scaled gradients were too large for fp16."""
        return self.loss_scale is not None and isfinite(self.loss) and not self.finite

    def is_refused(self, limit: float, *, finite: bool) -> bool:
        """Whether the step is not taken: its loss is above `limit`, or its loss or gradient norm is
        not finite although they must be (`finite`)."""
        return self.loss > limit or (finite and not self.finite)


@dataclass(frozen=True)
class DeviceResult:
    """A `StepResult` whose numbers the device may still be computing.

    Attributes:
        loss: fp64 scalar.
        grad_norm: fp64 scalar.
        tokens: int64 scalar.
        votes: fp64 scalar.
        rates: learning rates and weight decay of the step, which the host knows.
        extra: fp64 scalars by name.
        routing: fp64, as `Routers.sums` has it.
        loss_scale: as in `StepResult`; the host knows it.
        layers: layers with experts, as many as `routing` has rows.
        logits: the largest attention logits, as `AttentionLogits.agreed` has them.
    """

    loss: Tensor
    grad_norm: Tensor
    tokens: Tensor
    votes: Tensor
    rates: StepRates
    extra: Mapping[str, Tensor]
    routing: Tensor
    loss_scale: float | None
    layers: Sequence[int]
    logits: Tensor

    def found_inf(self, limit: float, *, finite: bool) -> Tensor:
        """As `StepResult.is_refused`: 1 or 0, fp32 scalar."""
        refused = self.loss > limit
        if finite:
            refused |= ~(self.loss.isfinite() & self.grad_norm.isfinite())
        return refused.float()

    def read(self) -> StepResult:
        """The numbers, once the device has them."""
        scalars = [self.loss, self.grad_norm, self.tokens.double(), self.votes]
        numbers = torch.stack([*scalars, *self.extra.values()])
        every = torch.cat([numbers, self.routing.flatten()]).tolist()
        loss, grad_norm, tokens, votes, *further = every[: len(numbers)]
        width, first = self.routing.shape[1], len(numbers)
        rows = [every[first + i * width : first + (i + 1) * width] for i in range(len(self.layers))]
        routing = tuple(map(LayerRouting.of, self.layers, rows))
        extra = dict(zip(self.extra, further, strict=True))
        if self.loss_scale is not None:
            extra["loss_scale"] = self.loss_scale
        return StepResult(loss, grad_norm, self.rates.lr, int(tokens), int(votes), extra, routing)
