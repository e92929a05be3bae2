"""Experts' messages hide in pairs of a forward and a backward, and nowhere else."""

from typing import Any

import numpy as np
import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.pipeline.ir import Kind
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.simulate import simulate
from fivefold.predict.cluster import preset
from fivefold.predict.program.pairs import Paired, hidden
from fivefold.predict.step import predict
from fivefold.predict.times.compute import Phases
from fivefold.predict.times.stage import Times
from fivefold.search.bound_tables import Ranks
from fivefold.search.enumeration import enumerate_space
from fivefold.search.time_bound import time_bound
from fivefold.tell.describe import summary
from tests.predict.layouts import planned

CLUSTER = preset("H100", 64)
GPU = CLUSTER.gpu
NAME = "overlap_moe_expert_parallel_comm"


def mixtral(schedule: str, *, overlap: bool, pp: int = 4, batch: int = 256) -> Layout:
    virtual = 4 if schedule == "combined_1f1b" and pp > 1 else None
    settings: dict[str, Any] = {"pipeline_schedule": schedule, NAME: overlap, "virtual": virtual}
    settings["delay_wgrad_compute"] = overlap
    return planned("mixtral-8x7b", 64, ep=8, pp=pp, gbs=batch, **settings)


LEFT = 1 - GPU.overlap_slowdown


@pytest.mark.parametrize(
    ("sent", "returned", "beside"),
    [
        (0.5, 0.25, 0.75),  # all of it
        (9.0, 0.0, 4.0 + 2.0),  # the forward's beside dX and dW
        (0.0, 9.0, 1.0 + 2.0),  # the backward's beside the forward and dW
        (5.0, 2.5, 7.0),  # everything that is computed
        (4.5, 0.5, 5.0),
    ],
)
def test_messages_hide_beside_the_other_half_and_a_delayed_dw(
    sent: float, returned: float, beside: float
) -> None:
    forward = Paired(Times(Phases(1.0, 8.0, 8.0), ep=Phases(sent, 8.0)), host=0.0)
    backward = Paired(Times(Phases(8.0, 4.0, 2.0), ep=Phases(8.0, returned)), host=0.0)
    assert hidden(GPU, forward, backward, delays=True) == pytest.approx(LEFT * beside)
    # Else the backward's hide beside the forward only.
    beside = min(sent, 4.0 + 2.0) + min(returned, 1.0)
    assert hidden(GPU, forward, backward, delays=False) == pytest.approx(LEFT * beside)


def test_a_pair_is_not_shorter_than_the_host_takes_to_issue_it() -> None:
    times = Times(Phases(1.0, 1.0, 1.0), ep=Phases(0.5, 0.5))  # 1.5 and 2.5
    assert hidden(GPU, Paired(times, 0.0), Paired(times, 0.0), delays=True) > 0.2
    assert hidden(GPU, Paired(times, 1.2), Paired(times, 1.2), delays=True) == pytest.approx(0.4)
    assert hidden(GPU, Paired(times, 1.5), Paired(times, 1.25), delays=True) == 0.0


@pytest.mark.parametrize("schedule", ["combined_1f1b", "dualpipe", "dualpipe_v"])
def test_only_pairs_are_shorter(schedule: str) -> None:
    alone, beside = (
        predict(mixtral(schedule, overlap=overlap), CLUSTER).costs for overlap in (False, True)
    )
    assert (alone.f, alone.b, alone.w) == (beside.f, beside.b, beside.w)
    assert alone.fb is None and beside.fb is not None
    for stage, row in enumerate(beside.fb):
        for partner, pair in enumerate(row):
            back = beside.b[partner] + beside.w[partner]
            assert max(beside.f[stage], beside.b[partner]) < pair < beside.f[stage] + back


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("schedule", ["combined_1f1b", "dualpipe", "dualpipe_v"])
def test_parts_add_up_and_the_pipeline_takes_what_its_program_does(
    schedule: str, overlap: bool
) -> None:
    prediction = predict(mixtral(schedule, overlap=overlap), CLUSTER)
    parts = {part.name: part.seconds for part in prediction.parts}
    assert sum(parts.values()) == pytest.approx(prediction.step_time)
    assert min(parts.values()) > -1e-9
    inside = prediction.step_time - sum(
        parts[name] for name in ("DP communication", "optimizer", "jitter")
    )
    assert prediction.simulation.makespan == pytest.approx(inside, rel=1e-3)
    kinds = {timed.act.kind for row in prediction.simulation.timeline for timed in row}
    assert (Kind.FB in kinds) == overlap


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v", "combined_1f1b"])
def test_halves_in_turn_take_what_their_program_takes(schedule: str) -> None:
    """The forward first, its message on the way during the backward."""
    layout = mixtral(schedule, overlap=False)
    prediction = predict(layout, CLUSTER)
    run = simulate(layout.program(), prediction.costs)
    assert prediction.simulation.makespan == pytest.approx(run.makespan)
    paired = executed(layout.order().program(), pairs=True, eager=True)
    assert run.makespan < simulate(paired, prediction.costs).makespan


def test_the_warm_up_hides_nothing() -> None:
    """What is exposed, with ever more microbatches, tends to what one pair leaves exposed."""

    def exposed(batch: int, *, overlap: bool = True) -> float:
        layout = mixtral("combined_1f1b", overlap=overlap, pp=1, batch=batch)
        parts = predict(layout, CLUSTER).parts
        seconds = next(part.seconds for part in parts if part.name == "EP communication")
        return seconds / layout.num_microbatches

    full = exposed(64, overlap=False)
    assert exposed(64) == pytest.approx(full)  # one microbatch has no partner
    alone = [exposed(64 * n) for n in (1, 2, 4, 8)]
    least = 2 * exposed(64 * 1024) - exposed(64 * 512)
    assert [share - least for share in alone] == pytest.approx(
        [(full - least) / n for n in (1, 2, 4, 8)], rel=1e-3
    )
    assert 0 < least < full / 2


def test_the_usual_schedule_of_an_overlap_is_one_of_pairs() -> None:
    layout = planned("mixtral-8x7b", 64, ep=8, gbs=512, **{NAME: True})
    assert layout.schedule == "combined_1f1b"
    assert "experts' messages in pairs" in summary(layout)
    config = layout.config.with_values(pipeline_schedule="1f1b")
    with pytest.raises(ConfigError, match="1f1b schedule runs none"):
        check(config, 64, planned=True)


def test_overlap_is_tried_without_a_pipeline_and_kept_where_asked_for() -> None:
    config = Config(PRESETS["mixtral-8x7b"]).with_values(global_batch_size=64, seq_length=512)
    space = enumerate_space(config, 16)
    assert ((space.columns["pairs"] == 1) & (space.columns["pp"] == 1)).any()
    asked = enumerate_space(config.with_values(**{NAME: True}), 16, frozenset({NAME}))
    assert len(asked) and asked.columns["pairs"].all()


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("deepseek-v2-lite", {NAME: True}),
        ("deepseek-v2-lite", {NAME: True, "pipeline_schedule": "dualpipe"}),
        ("llama3-8b", {"pipeline_schedule": "dualpipe"}),  # halves in turn, uneven ends
    ],
)
def test_no_pair_beats_the_bound(model: str, settings: dict[str, Any]) -> None:
    config = Config(PRESETS[model]).with_values(
        global_batch_size=64, seq_length=2048, recompute_granularity=None, **settings
    )
    cluster = preset("H800", 16)
    space = enumerate_space(config, 16, frozenset({"recompute_granularity", *settings}))
    few = space.take(np.arange(0, len(space), max(1, len(space) // 50)))
    bounds = time_bound(few, Ranks.of(config.model, few.partitions), cluster).seconds
    for row, bound in enumerate(bounds.tolist()):
        step = predict(check(few.config_of(row), 16, planned=True), cluster).step_time
        assert step / 5 < bound <= step * (1 + 1e-9)
