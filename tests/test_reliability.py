from math import sqrt

import pytest

from fivefold.reliability import (
    DEVICE_MTBF,
    HOURS,
    best_interval,
    checkpoint_seconds,
    goodput,
)


def test_the_rate_is_that_of_llama_3() -> None:
    assert pytest.approx(5.78, rel=1e-2) == DEVICE_MTBF / HOURS / 24 / 365
    assert goodput(16_384, 60).mtbf / HOURS == pytest.approx(54 * 24 / 419)


def test_llama_3_trained_more_than_nine_tenths_of_the_time_within_reason() -> None:
    """Its authors report more than 90 % effective training time."""
    checkpoint = checkpoint_seconds(12 * 405e9, 2048)
    assert goodput(16_384, checkpoint, restart=600).share == pytest.approx(0.92, abs=0.03)


@pytest.mark.parametrize("devices", [8, 1024, 16_384, 131_072])
@pytest.mark.parametrize("checkpoint", [1.0, 30.0, 300.0])
def test_no_other_interval_is_better(devices: int, checkpoint: float) -> None:
    best = goodput(devices, checkpoint)
    for factor in (0.3, 0.6, 0.8, 1.2, 1.5, 3):
        other = goodput(devices, checkpoint, interval=best.interval * factor)
        assert other.share < best.share * (1 + 1e-4)


def test_young_is_the_limit_of_rare_failures() -> None:
    assert best_interval(1e9, 1.0) == pytest.approx(sqrt(2e9), rel=1e-4)


def test_more_devices_and_slower_restarts_cost() -> None:
    assert goodput(16_384, 30).share < goodput(1024, 30).share < 1
    assert goodput(1024, 30, restart=3600).share < goodput(1024, 30, restart=60).share


def test_a_checkpoint_longer_than_what_it_guards_still_has_an_answer() -> None:
    assert 0 < goodput(10_000_000, 1000).share < 0.1


@pytest.mark.parametrize("device_mtbf", [1.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("devices", [1, 64, 10_000_000])
def test_any_rate_of_failures_has_an_answer(device_mtbf: float, devices: int) -> None:
    assert 0 <= goodput(devices, 30, device_mtbf=device_mtbf).share < 1
