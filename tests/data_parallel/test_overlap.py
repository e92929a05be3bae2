"""When gathers and reductions start and are waited for, by the order of events on a rank."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.data_parallel import communication
from fivefold.errors import ConfigError
from fivefold.pipeline.ir import Act
from fivefold.train.engine import Engine
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import shared_groups

INTERLEAVED = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
ZERO = "data_parallel_sharding_strategy"
EARLY = {"overlap_param_gather_with_optimizer_step": True}


def config(settings: dict[str, Any]) -> Config:
    stages = settings.get("pipeline_model_parallel_size", 1)
    return Config(PRESETS["debug-llama"]).with_values(
        num_layers=2 * stages,
        seq_length=16,
        global_batch_size=8 // stages,
        precision="fp32",
        **settings,
    )


@shared_groups()
def _events(rank: int, world: int, settings: dict[str, Any]) -> list[str]:
    """What a rank does in its second step; with EARLY, weights are evaluated after it, and a third
    is begun."""
    asked = config(settings)
    engine = Engine(check(asked, world), rank, torch.device("cpu"))
    rows = own_batch(engine, 0)
    engine.step(rows)
    seen: list[str] = []

    @contextmanager
    def acting(act: Act) -> Iterator[None]:
        seen.append(f"begin {act.kind}")
        yield
        seen.append(f"end {act.kind}")

    def told(what: str, native: Any) -> Any:
        def call(*args: Any, **others: Any) -> Any:
            seen.append(what)
            return native(*args, **others)

        return call

    with ExitStack() as patches:
        for what, of, name in (
            ("gather", communication, "start_all_gather"),
            ("gathered", communication._Waitable, "wait"),
            ("reduce", communication, "start_reduce_scatter"),
            ("await", FSDPParamGroup, "finalize_backward"),
            ("look", FSDPParamGroup, "pre_forward"),
            ("tie", RegisterPostBackwardFunction, "apply"),
            ("update", torch.optim.AdamW, "step"),
        ):
            patches.enter_context(patch.object(of, name, told(what, getattr(of, name))))
        engine.model.executor.observe = acting
        engine.step(rows)
        seen.append("next step")
        if asked.parallel.overlap_param_gather_with_optimizer_step:
            engine.evaluate([rows])
            engine.gradients(rows)
    engine.model.reshard()
    return seen


def events(ranks: int, settings: dict[str, Any]) -> list[list[str]]:
    """`_events` of every rank; tests share runs."""
    return _run(ranks, *sorted(settings.items()))


@cache
def _run(ranks: int, *settings: tuple[str, Any]) -> list[list[str]]:
    return run(ranks, _events, dict(settings))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {ZERO: "optim_grads"}), (4, {ZERO: "optim"} | INTERLEAVED)],
)
def test_parameters_travel_while_others_are_updated(ranks: int, settings: dict[str, Any]) -> None:
    for seen in events(ranks, settings | EARLY):
        step, following = seen[: seen.index("next step")], seen[seen.index("next step") :]
        updates = step[step.index("update") :]
        blocks = updates.count("update")
        assert blocks > 2
        assert updates == ["update", "gather"] * blocks, "each is sent before the next is updated"
        assert "gather" not in step[: step.index("update")] + following
        assert following[: following.index("begin F")].count("gathered") == 0
        assert following.count("gathered") == blocks
    for seen in events(ranks, settings):
        assert seen.count("update") == 1, "all at once"
        assert "gather" not in seen[seen.index("update") : seen.index("next step")]


@pytest.mark.parametrize(("strategy", "looks", "ties"), [("optim", 2, 1), ("optim_grads", 4, 4)])
def test_hooks_rest_where_nothing_is_gathered_or_reduced(
    strategy: str, looks: int, ties: int
) -> None:
    """Of four microbatches the first gathers, and the last reduces; with ZeRO-2 each does."""
    for seen in events(2, {ZERO: strategy}):
        step = seen[: seen.index("next step")]
        blocks = step.count("gather")
        assert step.count("begin F") == 4
        assert step.count("look") == looks * blocks
        assert step.count("tie") == ties * (blocks - 1), "of a stage's ends nothing enters"


PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("strategy", "stages"),
    [
        ("optim", PIPELINE),
        ("optim_grads", INTERLEAVED),
        pytest.param("optim", INTERLEAVED, marks=pytest.mark.exhaustive),
        pytest.param("optim_grads", PIPELINE, marks=pytest.mark.exhaustive),
    ],
)
def test_a_pipeline_gathers_while_its_stages_wait(strategy: str, stages: dict[str, Any]) -> None:
    for seen in events(4, {ZERO: strategy} | stages):
        step = seen[: seen.index("next step")]
        blocks = step.count("gather")
        assert blocks > 2
        assert step[:blocks] == ["gather"] * blocks, "all before the first action, none awaited"
        assert step.count("gathered") == blocks
    for seen in events(4, {ZERO: strategy, "overlap_param_gather": False} | stages):
        assert seen.index("begin F") < seen.index("gather")


def test_a_stage_does_not_wait_for_the_reductions_of_another() -> None:
    for seen in events(4, {ZERO: "optim"} | INTERLEAVED):
        step = seen[: seen.index("next step")]
        ends = [place for place, event in enumerate(step) if event.startswith("end")]
        assert step.index("reduce") < ends[-2], "another stage has yet to compute"
        assert ends[-1] < step.index("await") < step.index("update")


def test_stages_are_gathered_while_others_compute() -> None:
    settings = {ZERO: "optim_grads_params", "pipeline_max_unsharded_stages": 2}
    for seen in events(4, settings | INTERLEAVED):
        step = seen[: seen.index("next step")]
        hidden = 0
        for place, event in enumerate(step):
            if event.startswith("begin") and step[place - 1] == "gather":
                act = step[place : step.index(event.replace("begin", "end"), place)]
                hidden += "gathered" not in act
        assert hidden, "a gather started before an action, and not waited for in it"
        assert step.count("gather") == step.count("gathered")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "no effect on no_shard, which gathers nothing"),
        ({ZERO: "optim_grads_params"}, "no effect on optim_grads_params, which frees each layer"),
        ({ZERO: "optim", "overlap_param_gather": False}, "and overlap_param_gather is false"),
    ],
)
def test_where_nothing_can_be_gathered_early_it_is_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(config(settings | EARLY), 2)
