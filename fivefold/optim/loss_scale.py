"""The loss scale of fp16, without which small gradients would vanish."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from fivefold.config.config import Config
from fivefold.config.training import LARGEST_LOSS_SCALE

_Scale = Annotated[float, Meta(ge=1 / LARGEST_LOSS_SCALE, le=LARGEST_LOSS_SCALE)]
_Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class ScaleState:
    """The part of a checkpoint for a dynamic loss scale.

    Attributes:
        scale: the factor of the next step.
        good_steps: steps in a row without a gradient that overflowed, since the latest doubling.
        overflows: gradients that have overflowed since then.
    """

    scale: _Scale
    good_steps: _Count = 0
    overflows: _Count = 0


class LossScaler:
    """The loss scale of each step in fp16: constant, or adapted as in Megatron-LM.

    It is halved where gradients overflow, which are left out, and doubled after many that do not
    (Micikevicius et al., Mixed Precision Training, ICLR 2018). The same on every rank.

    Args:
        config: the scale, or how it is found.
        device: where the gradients are made.

    Attributes:
        factor: the scale, fp32 scalar on the device, the same memory in every step; None: 1.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config.optimizer
        self._state: ScaleState | None = None
        self.factor: Tensor | None = None
        if config.training.precision == "fp16":
            self.factor = torch.zeros((), dtype=torch.float32, device=device)
            self._set(ScaleState(self._config.loss_scales[0]))

    @property
    def scale(self) -> float | None:
        """The factor of the loss, and so of every gradient; None: 1, in other types."""
        return None if self._state is None else self._state.scale

    @property
    def state(self) -> ScaleState | None:
        """The state for a checkpoint; None for a constant scale."""
        return self._state if self._config.loss_scale is None else None

    def changed(self, before: float | None) -> str:
        """A sentence on how the scale has changed since the previous step."""
        assert before is not None and self.scale is not None
        then = f"is {_named(self.scale)} from now on" if self.scale != before else "stays"
        return f"the loss scale, {_named(before)}, {then}"

    def take(self, state: ScaleState | None) -> None:
        """Continue from the state of a checkpoint, if it has one."""
        if state is not None and self.state is not None:
            self._set(state)

    def update(self, *, overflowed: bool) -> None:
        """Choose the scale of the next step."""
        config, state = self._config, self.state
        if state is None:
            return
        if overflowed:
            scale, overflows = state.scale, state.overflows + 1
            if overflows >= config.hysteresis:
                scale = max(scale / 2, config.min_loss_scale)
            self._set(ScaleState(scale, 0, overflows))
        elif state.good_steps + 1 >= config.loss_scale_window:
            self._set(ScaleState(min(2 * state.scale, LARGEST_LOSS_SCALE)))
        else:
            self._set(ScaleState(state.scale, state.good_steps + 1, state.overflows))

    def _set(self, state: ScaleState) -> None:
        assert self.factor is not None
        self._state = state
        self.factor.fill_(state.scale)


def _named(scale: float) -> str:
    """A power of two as text: '2^16'."""
    power = round(math.log2(scale))
    return f"2^{power}" if 2.0**power == scale else f"{scale:g}"
