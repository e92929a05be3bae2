"""Detects a run that continues without learning."""

import math
from dataclasses import dataclass

from fivefold.train.step_result import StepResult

DEAD_STEPS = 5  # steps in a row without any gradient, after which a run is stopped
SAME_STEPS = 5  # steps in a row with the same loss, after which a run is suspect


@dataclass(frozen=True)
class LearningProblem:
    """A problem of a run whose numbers are all finite.

    Attributes:
        what: short description.
        why: further lines of the message.
        fatal: whether only a change of settings can help.
    """

    what: str
    why: tuple[str, ...]
    fatal: bool = False


class LearningChecks:
    """Examines the result of each step, which is the same on all ranks, and so is the conclusion.

    Args:
        vocab_size: vocabulary size of the model, for the loss of a uniform guess.
        lr: learning rate of the run, of which a lower one is to be tried.

    Attributes:
        dead: number of latest steps in a row without any gradient.
        attempt: settings that may help a run that does not learn.
    """

    def __init__(self, vocab_size: int, lr: float) -> None:
        self._uniform, self._vocab_size = math.log(vocab_size), vocab_size
        lower = f"a lower learning rate, such as --lr {lr / 10:g}"
        self.attempt = f"{lower}, or a longer --lr-warmup-iters"
        self.dead = self._same = 0
        self._loss = math.nan

    def look(self, result: StepResult) -> LearningProblem | None:
        """The problem of this step; reported when it begins, and again when it becomes fatal."""
        if result.tokens == 0:  # no token had a loss, so there was nothing to learn
            return None
        self.dead = self.dead + 1 if result.grad_norm == 0.0 else 0
        # A loss of 0 is normal for a model that has memorised its text.
        unchanged = result.loss == self._loss != 0.0 and result.lr > 0.0
        self._same = self._same + 1 if unchanged else 0
        self._loss = result.loss
        if self.dead in (1, DEAD_STEPS):
            lasting = f", for the {DEAD_STEPS}th step in a row" if self.dead > 1 else ""
            return LearningProblem(
                f"the gradient is exactly 0{lasting}", self._why_dead(), fatal=self.dead > 1
            )
        if self._same == SAME_STEPS - 1 and not self.dead:
            what = f"the loss has been {result.loss:.6g} to the last bit for {SAME_STEPS} steps"
            return LearningProblem(what, ("the model's answer no longer depends on what it reads",))
        return None

    def _why_dead(self) -> tuple[str, ...]:
        if self._loss == 0.0:
            why = "the loss is 0: every token is predicted with certainty"
        elif abs(self._loss - self._uniform) < 1e-3:
            why = (
                f"the loss is ln {self._vocab_size} = {self._uniform:.4f}, that of a uniform "
                "guess: activations have grown so large that their norm gives 0"
            )
        else:
            why = f"the loss is {self._loss:.6g}: something is saturated, and passes nothing back"
        return why, "from now on, only weight decay changes the weights"
