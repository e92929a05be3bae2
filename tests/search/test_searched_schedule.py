"""The planner prices the program that is searched for, as the trainer would run it."""

import pytest

from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.layout import Layout
from fivefold.pipeline.simulate import peak_in_flight
from fivefold.predict.cluster import preset
from fivefold.predict.memory.liveness import moments
from fivefold.predict.step import predict
from fivefold.search.request import Request
from fivefold.search.search import search
from tests.predict.layouts import planned

CLUSTER = preset("H100", 8)
GIVEN = {
    "pipeline_model_parallel_size": 4,
    "pipeline_schedule": "synthesised",
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "micro_batch_size": 1,
    "num_virtual_stages_per_pipeline_rank": 2,
    "recompute_granularity": None,
}


def uneven(schedule: str) -> Layout:
    return planned(
        "llama3-8b",
        8,
        gbs=32,
        virtual=2,
        pp=4,
        pipeline_schedule=schedule,
    )


def test_a_searched_program_takes_what_its_simulation_does() -> None:
    prediction = predict(uneven("synthesised"), CLUSTER)
    parts = {part.name: part.seconds for part in prediction.parts}
    inside = prediction.step_time - sum(
        parts[name] for name in ("DP communication", "optimizer", "jitter")
    )
    assert prediction.simulation.makespan == pytest.approx(inside)
    assert sum(parts.values()) == pytest.approx(prediction.step_time)
    usual = predict(uneven("interleaved_1f1b"), CLUSTER)
    assert prediction.step_time < usual.step_time


def test_its_memory_is_swept_over_the_same_program() -> None:
    layout = uneven("synthesised")
    found = moments(layout, splits_backward=True)
    most = [float((rank.kept + rank.waiting).sum(axis=1).max()) for rank in found]
    assert most == list(peak_in_flight(layout.order().program()))


def test_other_numbers_of_microbatches_are_searched_for_themselves() -> None:
    layout = uneven("synthesised")
    assert layout.order(5).program().num_microbatches == 5
    assert layout.order().program().num_microbatches == layout.num_microbatches


def test_a_search_keeps_to_it_and_to_its_limit() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(
        global_batch_size=16, seq_length=4096, pipeline_in_flight_limit=1.0, **GIVEN
    )
    given = frozenset({*GIVEN, "pipeline_in_flight_limit"})
    best = search(Request(config, given, CLUSTER)).best
    assert best.layout.schedule == "synthesised"
    assert best.prediction is not None
    layers = [len(stage.layers) for stage in best.layout.split.stages]
    held = peak_in_flight(best.layout.order().program())
    assert max(held) * max(layers) <= 1.0 * 32 / 4 + 1e-9
