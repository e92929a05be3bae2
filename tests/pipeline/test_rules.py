"""What the settings of a pipeline ask of each other, before anything starts."""

from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import Kind, v_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.simulate import peak_in_flight, simulate
from fivefold.pipeline.validate import validate

MODEL = ModelConfig(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=512)


def layout(**values: Any) -> Layout:
    settings = {"pipeline_model_parallel_size": 4, "global_batch_size": 8, "seq_length": 64}
    return check(Config(MODEL).with_values(**(settings | values)), 4)


@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "v_min", "dualpipe_v"])
def test_a_schedule_that_wants_a_v_gets_one(schedule: str) -> None:
    found = layout(pipeline_schedule=schedule)
    assert found.split.placement == v_placement(4, 8)
    assert [stage.layers for stage in found.split.stages] == [(i,) for i in range(8)]
    written = layout(pipeline_schedule=schedule, pipeline_model_parallel_layout="Et|(t|)*6tL")
    assert written.split == found.split


def test_uneven_ends_of_a_v_are_both_on_the_first_rank() -> None:
    found = layout(
        pipeline_schedule="zb_v", decoder_first_pipeline_num_layers=4, num_layers=10
    ).split
    assert [len(stage.layers) for stage in found.stages] == [2, 1, 1, 1, 1, 1, 1, 2]
    assert [len(found.stages[s].layers) for s in found.stages_of(0)] == [2, 2]


def test_both_copies_of_the_model_are_on_every_rank() -> None:
    found = layout(pipeline_schedule="dualpipe")
    assert found.num_copies == 2
    for rank in range(4):
        stages = found.stages_of(rank)
        assert list(stages) == [rank, 7 - rank]
        assert [spec.layers for spec in stages.values()] == [
            found.split.stages[rank].layers,
            found.split.stages[3 - rank].layers,
        ]


def test_a_search_finds_the_same_program_on_every_rank() -> None:
    found = [layout(pipeline_schedule="synthesised") for _ in range(2)]
    assert found[0].program() == found[1].program()
    validate(found[0].program())
    held = [len(stage.layers) / 2 for stage in found[0].split.stages]
    assert all(size == 4 / 8 * 8 / 4 for size in held)
    assert max(peak_in_flight(found[0].order().program())) <= 4
    little = layout(pipeline_schedule="synthesised", pipeline_in_flight_limit=2.0)
    assert max(peak_in_flight(little.order().program())) <= 2
    assert little.program(forward_only=True).num_microbatches == 8


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe_v", "combined_1f1b"])
def test_the_second_half_of_a_pair_waits_for_its_own_message_only(schedule: str) -> None:
    virtual = 2 if schedule == "combined_1f1b" else None
    found = layout(pipeline_schedule=schedule, num_virtual_stages_per_pipeline_rank=virtual)
    paired, run = found.order().program(), found.program()
    assert any(act.kind is Kind.FB for acts in paired.ranks for act in acts)
    assert not any(act.kind is Kind.FB for acts in run.ranks for act in acts)
    validate(run)
    costs = Costs.uniform(run.num_stages, hop=0.1)
    together, apart = (simulate(p, costs).makespan for p in (eager_dx(paired), run))
    assert apart < together


def test_stages_are_gathered_where_the_program_says() -> None:
    found = layout(
        data_parallel_sharding_strategy="optim_grads_params",
        pipeline_max_unsharded_stages=1,
        pipeline_schedule="zb_v",
    )
    counts = [sum(act.kind is Kind.UNSHARD for act in acts) for acts in found.program().ranks]
    assert min(counts) >= 2
    plain = layout(data_parallel_sharding_strategy="optim_grads_params")
    assert not any(act.kind is Kind.UNSHARD for acts in plain.program().ranks for act in acts)


WRONG: dict[str, dict[str, Any]] = {
    "cannot be cut into 3 equal slices": {
        "pipeline_schedule": "sliced_1f1b",
        "num_sequence_slices": 3,
    },
    "sliced_1f1b cuts sequences, and num_sequence_slices is 1": {
        "pipeline_schedule": "sliced_1f1b"
    },
    "num_sequence_slices must be at least 1": {"num_sequence_slices": 0},
    "1f1b cannot cut a sequence into 2 slices": {"num_sequence_slices": 2},
    "the synthesised schedule orders whole microbatches, and num_sequence_slices is 2": {
        "pipeline_schedule": "synthesised",
        "num_sequence_slices": 2,
    },
    "num_sequence_slices does not go with recompute_granularity full": {
        "pipeline_schedule": "sliced_1f1b",
        "num_sequence_slices": 2,
        "recompute_granularity": "full",
    },
    "pipeline_in_flight_limit has no effect on the zb_h1": {
        "pipeline_schedule": "zb_h1",
        "pipeline_in_flight_limit": 3.0,
    },
    "rank 0 holds 1 for one microbatch, the cap is 0.5": {
        "pipeline_schedule": "synthesised",
        "pipeline_in_flight_limit": 0.5,
    },
    "pipeline_max_unsharded_stages has no effect on optim": {
        "data_parallel_sharding_strategy": "optim",
        "pipeline_max_unsharded_stages": 2,
    },
    "the zb_v schedule needs two stages per rank": {
        "pipeline_schedule": "zb_v",
        "pipeline_model_parallel_layout": "loop:Et|(t|)*6tL",
    },
    "dualpipe over 4 ranks needs at least 8 microbatches, not 6": {
        "pipeline_schedule": "dualpipe",
        "global_batch_size": 6,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_go_together_is_said(message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(**WRONG[message])
    assert message in str(caught.value)
