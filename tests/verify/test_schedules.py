"""Every pipeline schedule trains as one device does."""

from typing import Any

import pytest

from tests.verify.cases import MODELS, STRATEGIES, chosen, config, flags, verify_in_pool

LINE, LOOP, V = "Et|ttL", "E|t|t|tL", "E|t|t|tL"
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
FOUR = {LINE: "Et||t|tL", LOOP: "E|t|||t|t||L"}  # the same on four ranks, one stage empty
FAMILIES = ("llama", "llama tied", "gpt", "gpt untied")


def case(schedule: str, **changes: Any) -> dict[str, Any]:
    """Settings of a schedule: 8 microbatches a step, slices where it cuts sequences."""
    slices = 4 if schedule == "sliced_1f1b" else 1
    settings = {"pipeline_schedule": schedule, "num_sequence_slices": slices}
    return settings | {"micro_batch_size": 1} | changes


def passes(world: int, model: str, settings: dict[str, Any]) -> None:
    report = verify_in_pool(world, config(MODELS[model], **settings))
    assert report.passed, report.text()


def _family(schedule: str, turn: int = 0) -> str:
    return FAMILIES[(list(SCHEDULES).index(schedule) + turn) % len(FAMILIES)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    layout = flags(pp=2, stages=SCHEDULES[schedule])
    passes(2, _family(schedule), layout | case(schedule))


WITH_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "two copies of a tied model on four ranks": (
        "llama tied",
        flags(pp=4, stages=FOUR[LINE]) | case("dualpipe"),
    ),
    "two copies, sharded": (
        "llama tied",
        flags(pp=2, dp=2, stages=LINE, strategy="optim_grads_params") | case("dualpipe"),
    ),
    "two copies, tensor parallel": (
        "gpt",
        flags(pp=2, tp=2, sequence=True, stages=LINE) | case("dualpipe"),
    ),
    "two copies in bf16": (
        "llama tied",
        flags(pp=2, dp=2, stages=LINE) | case("dualpipe", precision="bf16"),
    ),
    "halves of backwards, ZeRO-1": (
        "gpt",
        flags(pp=2, dp=2, stages=V, strategy="optim") | case("zb_v"),
    ),
    "halves of backwards, ZeRO-3": (
        "llama tied",
        flags(pp=2, dp=2, stages=V, strategy="optim_grads_params") | case("zb_v"),
    ),
    "pairs, ZeRO-2": (
        "llama tied",
        flags(pp=2, dp=2, stages=V, strategy="optim_grads")
        | case("dualpipe_v", global_batch_size=16),
    ),
    "one stage gathered at a time": (
        "llama",
        flags(pp=2, dp=2, stages=V, strategy="optim_grads_params")
        | case("zb_v", pipeline_max_unsharded_stages=1),
    ),
    "slices of a sequence that is split over tensor parallelism": (
        "gpt",
        flags(pp=2, tp=2, sequence=True, stages=LINE) | case("sliced_1f1b", micro_batch_size=2),
    ),
    "slices, stages gathered once": (
        "gpt",
        flags(pp=2, dp=2, stages=LINE, strategy="optim_grads_params")
        | case("sliced_1f1b", pipeline_max_unsharded_stages=1),
    ),
    "slices with attention made again": (
        "llama",
        flags(pp=2, dp=2, stages=LINE)
        | case("sliced_1f1b", recompute_granularity="selective", recompute_modules=("core_attn",)),
    ),
    "slices under a window": (
        "llama",
        flags(pp=4, stages=FOUR[LINE]) | case("sliced_1f1b", window_size=5),
    ),
    "dW with its dX, tensor parallel": (
        "gpt",
        flags(pp=2, tp=2, sequence=True, stages=LINE) | case("1f1b", pipeline_dx_first=False),
    ),
    "dW with its dX where the schedule has both, ZeRO-2": (
        "llama tied",
        flags(pp=2, dp=2, stages=V, strategy="optim_grads") | case("zb_v", pipeline_dx_first=False),
    ),
    "little memory": ("llama", flags(pp=4, stages=FOUR[V]) | case("v_min")),
    "searched under a limit": (
        "llama tied",
        flags(pp=4, stages=FOUR[V]) | case("synthesised", pipeline_in_flight_limit=3.0),
    ),
    "recomputed, in halves": (
        "llama",
        flags(pp=2, dp=2, stages=LOOP, strategy="optim_grads")
        | case("interleaved_zb", recompute_granularity="full"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    chosen(
        WITH_OTHERS,
        "two copies of a tied model on four ranks",
        "one stage gathered at a time",
        "searched under a limit",
    ),
)
def test_schedules_with_other_techniques(name: str) -> None:
    passes(4, *WITH_OTHERS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_every_strategy(schedule: str, strategy: str) -> None:
    model = _family(schedule, STRATEGIES.index(strategy))
    sharded = flags(pp=2, dp=2, stages=SCHEDULES[schedule], strategy=strategy)
    passes(4, model, sharded | case(schedule))
    passes(
        8,
        model,
        flags(pp=4, dp=2, stages=FOUR[SCHEDULES[schedule]], strategy=strategy)
        | case(schedule, global_batch_size=16),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_eight_ranks(schedule: str) -> None:
    stages = "E|t||t|||t|L" if SCHEDULES[schedule] == LINE else "E|t||t|||||||t|||||L"
    passes(
        8, _family(schedule, 1), flags(pp=8, stages=stages) | case(schedule, global_batch_size=16)
    )
