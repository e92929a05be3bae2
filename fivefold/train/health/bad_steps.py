"""Recognises harmful steps: a loss or gradient that is not a number, or a loss that spikes."""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from fivefold.config.training import TrainingConfig
from fivefold.train.step_result import StepResult

REMEMBERED = 100  # losses
LEAST = 20  # losses needed before one can count as a spike
MOST = 10  # consecutive bad steps that are left out


class BadSteps:
    """Judges the result of each step, which is the same on all ranks, and so is the judgement.

    Args:
        training: what is checked, and what becomes of a bad step.
        least_scale: the loss scale in fp16 below which none is tried.
    """

    def __init__(self, training: TrainingConfig, least_scale: float = 1.0) -> None:
        self._training, self._least_scale = training, least_scale
        self._losses: deque[float] = deque(maxlen=REMEMBERED)
        self._in_a_row = self._reached = 0

    def remember(self, losses: Iterable[float]) -> None:
        """Restore the losses of an earlier state of the run; later ones are forgotten."""
        self._losses.clear()
        self._losses.extend(losses)

    @property
    def losses(self) -> tuple[float, ...]:
        """The latest losses, oldest first, where spikes are looked for."""
        return tuple(self._losses)

    @property
    def limit(self) -> float:
        """The loss above which the next step is a spike; infinite while few losses are known, or if
        their median is 0, as for a memorised text."""
        if not self._training.check_for_spiky_loss or len(self._losses) < LEAST:
            return math.inf
        return self._training.spiky_loss_factor * median(self._losses) or math.inf

    def is_trial(self, result: StepResult) -> bool:
        """Whether a skipped step only showed that the loss scale must be lowered."""
        return result.overflowed and (result.loss_scale or 0.0) > self._least_scale

    def look(self, step: int, result: StepResult) -> str:
        """What was bad about a step that was not taken; empty if the step was good."""
        wrong = ""
        if result.overflowed:
            wrong = (
                f"the gradients of step {step} overflow in fp16, with the least loss scale, "
                f"{result.loss_scale:g}"
            )
        elif not result.finite and self._training.must_be_finite:
            wrong = (
                f"step {step} is not finite: loss {result.loss:.6g}, "
                f"gradient norm {result.grad_norm:.6g}"
            )
        elif result.loss > self.limit:
            usual = median(self._losses)
            wrong = (
                f"the loss of step {step} is a spike: {result.loss:.6g}, "
                f"{result.loss / usual:.2f} x {usual:.6g}, the median of {len(self._losses)} steps"
            )
        if wrong:
            self._in_a_row += 1
            self._reached = max(self._reached, step)
        else:
            if step >= self._reached:  # beyond the steps that were repeated
                self._in_a_row = 0
            # A checkpoint keeps them as JSON, which has neither infinities nor NaN.
            if self._training.check_for_spiky_loss and math.isfinite(result.loss):
                self._losses.append(result.loss)
        return wrong

    @property
    def too_many(self) -> bool:
        """Whether so many steps were left out that leaving more out will not help."""
        return self._in_a_row > MOST
