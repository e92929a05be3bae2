"""Every pipeline schedule trains as one device does."""

from typing import Any

import pytest

from tests.verify.cases import MODELS, config, flags, verify_in_pool

LINE, LOOP, V = "Ett|tttL", "Et|tt|t|tL", "Et|tt|t|tL"
FOUR_IN_LINE, FOUR_IN_V = "Et|tt||ttL", "E|t|t||t|t|t|L"

SCHEDULES = {
    "gpipe": LINE,
    "looped_bfs": LOOP,
    "1f1b": LINE,
    "eager_1f1b": LINE,
    "sliced_1f1b": LINE,
    "interleaved_1f1b": LOOP,
    "combined_1f1b": LOOP,
    "zb_h1": LINE,
    "zb_h2": LINE,
    "interleaved_zb": LOOP,
    "zb_v": V,
    "v_half": V,
    "v_min": V,
    "dualpipe": LINE,
    "dualpipe_v": V,
    "synthesised": V,
}
FAMILIES = ("llama", "llama tied", "gpt", "gpt untied")


def case(schedule: str, **changes: Any) -> dict[str, Any]:
    """A layout with that schedule; slices where it cuts sequences."""
    slices = 4 if schedule == "sliced_1f1b" else 1
    return {"pipeline_schedule": schedule, "num_sequence_slices": slices} | changes


def passes(world: int, model: str, settings: dict[str, Any]) -> None:
    report = verify_in_pool(world, config(MODELS[model], **settings))
    assert report.passed, report.text()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    model = FAMILIES[list(SCHEDULES).index(schedule) % 4]
    layout = flags(pp=2, stages=SCHEDULES[schedule])
    passes(2, model, layout | case(schedule))
