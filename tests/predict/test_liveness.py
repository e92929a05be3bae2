"""Microbatches in flight: the closed forms of the literature, and programs cut short."""

from typing import Any

import numpy as np
import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.predict.memory.liveness import HeldMicrobatches, _moments, moments

P, M = 4, 32


def _most(schedule: str, *, virtual: int = 1, microbatches: int = M) -> list[float]:
    """Of each rank, the most microbatches between forward and backward, over all its stages."""
    config = Config(PRESETS["debug-llama"]).with_values(
        num_layers=P * virtual,
        pipeline_model_parallel_size=P,
        pipeline_model_parallel_layout=None if virtual != 2 else _layout(schedule),
        num_virtual_stages_per_pipeline_rank=virtual if virtual > 2 else None,
        pipeline_schedule=schedule,
        global_batch_size=microbatches,
    )
    found = moments(check(config, P, planned=True), splits_backward=False)
    return [float(rank.kept.sum(axis=1).max()) for rank in found]


def _layout(schedule: str) -> str:
    shape = "v:" if schedule in ("zb_v", "v_half", "v_min", "dualpipe_v") else ""
    return f"{shape}Et|(t|)*{2 * P - 2}tL"


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("gpipe", 1, [M] * P),
        ("1f1b", 1, [P - r for r in range(P)]),
        ("zb_h1", 1, [P - r for r in range(P)]),
        ("interleaved_1f1b", 2, [2 * (P - r - 1) + P + 1 for r in range(P)]),
        ("interleaved_1f1b", 3, [2 * (P - r - 1) + 2 * P + 1 for r in range(P)]),
        ("combined_1f1b", 2, [2 * (P - r - 1) + P + 2 for r in range(P)]),
        ("zb_v", 2, [2 * P] * P),
        ("dualpipe_v", 2, [2 * P + 1] * P),
        ("dualpipe", 1, [P + 1] * P),
    ],
)
def test_in_flight_closed_forms(schedule: str, virtual: int, expected: list[int]) -> None:
    assert _most(schedule, virtual=virtual) == expected


def test_few_microbatches_bound_what_is_in_flight() -> None:
    assert _most("1f1b", microbatches=2) == [2, 2, 2, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
@pytest.mark.parametrize("microbatches", [P, M])
def test_gradients_meet_all_that_is_in_flight_once_it_is_again(
    schedule: str, microbatches: int
) -> None:
    """Not in a step with no more microbatches than are in flight; GPipe's all are."""
    settings = Config(PRESETS["debug-llama"]).with_values(
        num_layers=P,
        pipeline_model_parallel_size=P,
        pipeline_schedule=schedule,
        global_batch_size=microbatches,
    )
    (first, *_) = moments(check(settings, P, planned=True), splits_backward=False)
    fullest = first.kept[:, 0] == first.kept.max()
    met = bool((first.unmade[fullest, 0] == 0).any())
    assert met == (microbatches == M and schedule != "gpipe")
    assert first.unmade[0, 0] == 1 and first.unmade[-1, 0] == 0


@pytest.mark.parametrize(
    "schedule", ["1f1b", "zb_h2", "interleaved_1f1b", "interleaved_zb", "zb_v", "v_half", "v_min"]
)
def test_a_program_cut_short_has_the_same_peaks(schedule: str) -> None:
    several = schedule not in ("1f1b", "zb_h2")
    config: dict[str, Any] = {"pipeline_model_parallel_layout": _layout(schedule)}
    if not several:
        config = {}
    settings = Config(PRESETS["debug-llama"]).with_values(
        num_layers=P * (1 + several),
        pipeline_model_parallel_size=P,
        pipeline_schedule=schedule,
        global_batch_size=8 * P,
        **config,
    )
    layout = check(settings, P, planned=True)
    whole = _moments(layout.order(8 * P), pairs=False, eager=True)
    cut = moments(layout, splits_backward=True)
    assert list(map(_seen, cut)) == list(map(_seen, whole))


def _seen(rank: HeldMicrobatches) -> set[tuple[object, ...]]:
    """Everything that a rank is ever found to hold, with what runs and the phase."""
    held = np.concatenate([rank.kept, rank.inputs, rank.waiting, rank.unmade], axis=1)
    running = [rank.running[which] for which in rank.which]
    return set(zip(running, rank.backwards.tolist(), map(tuple, held.tolist()), strict=True))
