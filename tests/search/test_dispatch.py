"""How tokens reach their experts: what each way costs, and which one is taken."""

import numpy as np
import pytest

from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.predict.cluster import preset
from fivefold.predict.step import predict
from fivefold.search.enumeration import enumerate_space
from fivefold.search.request import Request
from fivefold.search.search import search
from fivefold.tell.describe import requirements
from fivefold.tell.explain import sensitivities
from tests.predict.layouts import planned

NAME = "moe_token_dispatcher_type"


@pytest.mark.parametrize(("model", "ep"), [("mixtral-8x7b", 4), ("qwen3-30b-a3b", 32)])
def test_flex_sends_least(model: str, ep: int) -> None:
    def exposed(kind: str) -> float:
        layout = planned(model, 32, ep=ep, gbs=64, **{NAME: kind})
        parts = predict(layout, preset("H100", 32)).parts
        return next(part.seconds for part in parts if part.name == "EP communication")

    assert exposed("flex") < min(exposed("alltoall"), exposed("allgather"))


def test_the_space_takes_flex_where_experts_are_spread_unless_one_is_given() -> None:
    config = Config(PRESETS["mixtral-8x7b"]).with_values(global_batch_size=32, seq_length=512)
    for given, expected in ((frozenset(), "flex"), (frozenset({NAME}), "alltoall")):
        space = enumerate_space(config, 16, given)
        spread, whole = (
            space.config_of(int(np.flatnonzero(rows)[0])).parallel.moe_token_dispatcher_type
            for rows in (space.columns["ep"] > 1, space.columns["ep"] == 1)
        )
        assert (spread, whole) == (expected, "alltoall")


def test_the_answer_says_what_flex_asks_for_and_what_it_saves() -> None:
    config = Config(PRESETS["qwen3-30b-a3b"]).with_values(
        global_batch_size=64,
        seq_length=4096,
        expert_model_parallel_size=16,
        pipeline_model_parallel_size=1,
        tensor_model_parallel_size=1,
    )
    given = frozenset(f"{name}_model_parallel_size" for name in ("expert", "pipeline", "tensor"))
    result = search(Request(config, given, preset("H100", 16)))
    (note,) = requirements(result.best.layout)
    assert "DeepEP" in note
    without = next(
        s for s in sensitivities(result) if s.change == f"--{NAME} alltoall".replace("_", "-")
    )
    assert without.seconds > result.best.seconds
    dense = planned("llama3-8b", 16)
    assert not list(requirements(dense))
