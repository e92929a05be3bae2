import math
import subprocess
import sys
from dataclasses import replace
from typing import Literal

import pytest

from fivefold.config.training import OptimizerConfig, TrainingConfig
from fivefold.optim import schedule
from fivefold.optim.schedule import learning_rate


def rates(steps: list[int], **settings: object) -> list[float]:
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.1, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, optimizer, TrainingConfig(train_iters=110)) for step in steps]


def test_warm_up_is_linear_from_its_first_rate_and_reaches_the_peak() -> None:
    assert rates([0, 5, 10], lr_warmup_iters=10, lr_warmup_init=0.2) == pytest.approx(
        [0.2, 0.6, 1.0]
    )


def test_constant_stays_at_the_peak_after_the_last_step() -> None:
    assert rates([0, 50, 500], lr_decay_style="constant") == [1.0, 1.0, 1.0]


def test_linear_and_cosine_decay_between_warm_up_and_end() -> None:
    steps = [10, 35, 60, 110, 1000]
    linear = rates(steps, lr_warmup_iters=10, lr_decay_style="linear")
    assert linear == pytest.approx([1.0, 0.775, 0.55, 0.1, 0.1])
    cosine = rates(steps, lr_warmup_iters=10, lr_decay_style="cosine")
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    assert cosine == pytest.approx([1.0, quarter, 0.55, 0.1, 0.1])


def test_lr_decay_iters_ends_the_decay_before_train_iters() -> None:
    assert rates([10, 20, 21], lr_decay_style="linear", lr_decay_iters=20) == pytest.approx(
        [0.55, 0.1, 0.1]
    )


@pytest.mark.parametrize(
    ("style", "half_way"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * math.sqrt(0.5) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_stable_until_its_decay(style: str, half_way: float) -> None:
    found = rates(
        [11, 90, 100, 110],
        lr_warmup_iters=10,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=20,
        lr_wsd_decay_style=style,
    )
    assert found == pytest.approx([1.0, 1.0, 0.1 + 0.9 * half_way, 0.1])


def test_no_torch_is_imported() -> None:
    code = "import fivefold.optim.schedule, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_inverse_square_root_goes_on_from_the_warm_up_until_its_end() -> None:
    found = rates([4, 16, 36, 110, 111], lr_warmup_iters=4, lr_decay_style="inverse-square-root")
    assert found == pytest.approx([1.0, 0.5, 1 / 3, math.sqrt(4 / 110), 0.1])


def test_the_ends_have_rates_of_their_own() -> None:
    training = TrainingConfig(train_iters=110)
    usual = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="linear")
    own = replace(usual, decoupled_lr=3.0, decoupled_min_lr=0.0)
    for config, of_ends in ((usual, 0.55), (own, 1.5), (replace(own, decoupled_min_lr=None), 1.55)):
        lr, ends, decay = schedule.rates(55, config, training)
        assert (lr, ends, decay) == pytest.approx((0.55, of_ends, 0.1))


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.25), ("cosine", 0.1464466)])
def test_weight_decay_grows_over_the_run(
    style: Literal["linear", "cosine"], quarter: float
) -> None:
    config = OptimizerConfig(
        weight_decay_incr_style=style,
        start_weight_decay=0.1,
        end_weight_decay=0.5,
    )
    for training in (TrainingConfig(train_iters=40), SAMPLES):
        found = [schedule.weight_decay(step, config, training) for step in (0, 10, 40, 99)]
        assert found == pytest.approx([0.1, 0.1 + 0.4 * quarter, 0.5, 0.5])


SAMPLES = TrainingConfig(train_samples=160, global_batch_size=4)
