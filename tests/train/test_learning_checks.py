import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.train.health.learning import DEAD_STEPS, SAME_STEPS, LearningChecks, LearningProblem
from fivefold.train.step_result import StepResult

VOCABULARY = 512


def step(loss: float, norm: float, *, lr: float = 1e-3, tokens: int = 64) -> StepResult:
    return StepResult(loss, norm, lr, tokens)


def symptoms(results: list[StepResult]) -> dict[int, LearningProblem]:
    checks = LearningChecks(VOCABULARY, 1e-3)
    seen = {number: checks.look(result) for number, result in enumerate(results, 1)}
    return {number: problem for number, problem in seen.items() if problem is not None}


def test_a_run_without_gradient_is_told_at_once_and_given_up_later() -> None:
    alive = [step(6.2, 2.0), step(5.9, 1.5)]
    dead = [step(math.log(VOCABULARY), 0.0)] * (DEAD_STEPS + 3)
    found = symptoms(alive + dead)
    assert {n: s.fatal for n, s in found.items()} == {3: False, 2 + DEAD_STEPS: True}
    assert found[3].what == "the gradient is exactly 0"
    assert "ln 512 = 6.2383" in found[3].why[0]


@pytest.mark.parametrize(
    ("loss", "says"), [(0.0, "with certainty"), (91.5, "91.5"), (6.3, "saturated")]
)
def test_the_loss_tells_why(loss: float, says: str) -> None:
    assert says in symptoms([step(loss, 0.0)])[1].why[0]


def test_a_loss_that_never_changes_is_suspicious_but_not_fatal() -> None:
    found = symptoms([step(7.5, 1e-30)] * (2 * SAME_STEPS))
    assert {n: s.fatal for n, s in found.items()} == {SAME_STEPS: False}


def test_a_text_that_is_known_by_heart_is_no_symptom_until_nothing_is_left_to_learn() -> None:
    assert not symptoms([step(0.0, 1e-30)] * (2 * SAME_STEPS))
    assert symptoms([step(0.0, 0.0)])


def test_a_batch_without_labels_and_a_learning_rate_of_zero_are_no_symptoms() -> None:
    assert not symptoms([step(0.0, 0.0, tokens=0)] * 20)
    assert not symptoms([step(6.2, 2.0, lr=0.0)] * 20)


@given(st.lists(st.sampled_from([(6.0, 0.0), (6.0, 1.0), (5.0, 0.0), (5.0, 1.0)]), max_size=40))
def test_it_is_fatal_exactly_where_enough_steps_in_a_row_had_no_gradient(
    steps: list[tuple[float, float]],
) -> None:
    found = symptoms([step(loss, norm) for loss, norm in steps])
    run, fatal = 0, set()
    for number, (_, norm) in enumerate(steps, 1):
        run = run + 1 if norm == 0.0 else 0
        if run == DEAD_STEPS:
            fatal.add(number)
    assert {n for n, s in found.items() if s.fatal} == fatal
