"""Layouts compute what one device computes: to 1e-12 in fp64, to 1e-5 in fp32."""

from typing import Any
from unittest.mock import patch

import pytest

from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from fivefold.train.step_result import StepResult
from fivefold.verify.report import VerifyReport
from tests.verify.cases import (
    MODELS,
    STAGES,
    STEPS,
    chosen,
    compare_on_rank,
    config,
    flags,
    matrix,
    name,
    verify_in_pool,
)

EVERY = [(world, case) for world in (1, 2, 4, 8) for case in matrix(world)]
TIED = {"llama": "llama tied", "gpt": "gpt untied"}  # every other layout ties what the first unties

# One of each kind, and each kind with each other at least once.
QUICK = [
    (1, flags()),
    (2, flags(tp=2)),
    (2, flags(pp=2, strategy="optim_grads_params", stages=STAGES[2, 2])),
    (4, flags(tp=4, sequence=True, strategy="optim")),
    (4, flags(pp=4, stages=STAGES[4, 1])),
    (4, flags(tp=2, dp=2, sequence=True, strategy="optim_grads_params")),
    (4, flags(pp=2, dp=2, strategy="optim_grads")),
    (4, flags(dp=4, strategy="optim_grads", replicas=2)),
    (8, flags(tp=2, pp=2, dp=2, sequence=True, strategy="optim", stages=STAGES[2, 2])),
    (8, flags(tp=2, dp=4, sequence=True, strategy="optim_grads_params", replicas=2)),
    (8, flags(pp=4, dp=2, strategy="optim_grads", stages=STAGES[4, 2])),
]

# (ranks, model, settings): the corners that each broke something once, somewhere.
CORNERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "more stages than microbatches": (
        4,
        "llama",
        flags(pp=4, stages=STAGES[4, 1]) | {"micro_batch_size": 1, "global_batch_size": 2},
    ),
    "one microbatch": (
        2,
        "gpt",
        flags(pp=2, stages=STAGES[2, 1]) | {"micro_batch_size": 1, "global_batch_size": 1},
    ),
    "one microbatch, gradients reduced in its hooks": (
        2,
        "llama tied",
        flags(strategy="optim_grads") | {"micro_batch_size": 1, "global_batch_size": 2},
    ),
    "gpipe": (2, "llama tied", flags(pp=2, stages="Et|ttL") | {"pipeline_schedule": "gpipe"}),
    "both ends of a tied model on one rank": (
        2,
        "llama tied",
        flags(pp=2, stages="v:E|t|t|tL") | {"pipeline_schedule": "gpipe"},
    ),
    "both ends on one rank, sharded": (
        4,
        "llama tied",
        flags(pp=2, stages="v:E|t|t|tL", strategy="optim_grads_params")
        | {"pipeline_schedule": "gpipe"},
    ),
    "both ends on one rank, tensor parallel": (
        4,
        "gpt",
        flags(tp=2, pp=2, stages="v:E|t|t|tL", sequence=True) | {"pipeline_schedule": "gpipe"},
    ),
    "tied over the pipeline, sharded and tensor parallel": (
        8,
        "llama tied",
        flags(tp=2, pp=2, stages="Et|ttL", sequence=True, strategy="optim_grads_params"),
    ),
    "tied on one stage, sharded and tensor parallel": (
        4,
        "gpt",
        flags(tp=2, strategy="optim_grads_params", sequence=True),
    ),
    "a rank with nothing, sharded": (
        8,
        "llama",
        flags(pp=4, stages="E|t||ttL", strategy="optim_grads_params"),
    ),
    "a rank with nothing in all its stages": (
        4,
        "llama",
        flags(pp=4, stages="E||t|t||||tL", strategy="optim"),
    ),
    "an embedding alone, sharded and tensor parallel": (
        4,
        "llama",
        flags(tp=2, pp=2, stages="E|t*3L", strategy="optim"),
    ),
    "a loss that counts as a layer": (
        2,
        "llama",
        flags(pp=2)
        | {
            "pipeline_model_parallel_layout": None,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    "virtual stages on one rank": (
        1,
        "gpt",
        flags(stages="Et|t|tL") | {"pipeline_schedule": "interleaved_1f1b"},
    ),
    "sent in bf16, which one device does not": (
        2,
        "gpt",
        flags(strategy="optim")
        | {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True},
    ),
    "no overlap, replicated": (2, "gpt", flags() | {"overlap_grad_reduce": False}),
    "no overlap, ZeRO-1": (
        2,
        "gpt",
        flags(strategy="optim") | {"overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    "no overlap, ZeRO-1, pipeline": (
        4,
        "gpt",
        flags(pp=2, stages="Et|ttL", strategy="optim") | {"overlap_grad_reduce": False},
    ),
    "no overlap, HSDP, ZeRO-3": (
        4,
        "llama tied",
        flags(strategy="optim_grads_params", replicas=2) | {"overlap_grad_reduce": False},
    ),
    "gathered in the optimizer step": (
        2,
        "llama tied",
        flags(strategy="optim_grads") | {"overlap_param_gather_with_optimizer_step": True},
    ),
    "gathered in the optimizer step, interleaved": (
        4,
        "gpt",
        flags(pp=2, dp=2, stages=STAGES[2, 2], strategy="optim")
        | {"overlap_param_gather_with_optimizer_step": True},
    ),
    "stages gathered one action ahead": (
        4,
        "llama",
        flags(pp=2, dp=2, stages=STAGES[2, 2], strategy="optim_grads_params")
        | {"pipeline_max_unsharded_stages": 2},
    ),
    "gradients of a bucket each": (2, "llama", flags(tp=1, dp=2) | {"ddp_bucket_size": 1}),
    "groups of microbatches": (
        2,
        "llama",
        flags(pp=2, stages=STAGES[2, 2]) | {"microbatch_group_size_per_virtual_pipeline_stage": 4},
    ),
    "no clipping": (2, "llama", flags(tp=2) | {"clip_grad": 0.0}),
    "one key/value head": (4, "llama", flags(tp=4, sequence=True) | {"num_query_groups": 1}),
    "one key/value head, a vocabulary part of padding only": (
        4,
        "llama",
        flags(tp=4, sequence=True)
        | {"num_query_groups": 1, "vocab_size": 70, "make_vocab_size_divisible_by": 104},
    ),
    "a vocabulary part of padding only": (
        4,
        "llama",
        flags(tp=4) | {"vocab_size": 70, "make_vocab_size_divisible_by": 104},
    ),
}


AWARE = {"use_precision_aware_optimizer": True}
NARROW = {**AWARE, "main_grads_dtype": "bf16"}
# The same for what only bf16 has: FSDP2 around a single shard, a narrow type on the wire.
BF16_CORNERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "replicated": (2, "llama", flags(dp=2)),
    "replicated, tied, interleaved": (4, "gpt", flags(pp=2, dp=2, stages=STAGES[2, 2])),
    "no overlap": (4, "gpt", flags(pp=2, dp=2) | {"overlap_grad_reduce": False}),
    "sent in bf16": (2, "gpt", flags(dp=2, strategy="optim") | {"grad_reduce_in_bf16": True}),
    "kept in bf16, tied, tensor parallel": (
        4,
        "llama tied",
        flags(tp=2, pp=2, stages=STAGES[2, 1]) | NARROW,
    ),
    "kept in bf16, two pipelines": (
        4,
        "gpt",
        flags(pp=2, dp=2, stages=STAGES[2, 2], strategy="optim") | NARROW,
    ),
    "kept in bf16, ZeRO-2, replicas": (
        4,
        "llama",
        flags(strategy="optim_grads", replicas=2) | NARROW,
    ),
    "kept in bf16, ZeRO-3, on the host, summed in fp32": (
        2,
        "gpt",
        flags(strategy="optim_grads_params")
        | NARROW
        | {"optimizer_cpu_offload": True, "ddp_reduce_scatter_with_fp32_accumulation": True},
    ),
    "kept in bf16, deferred weights, ZeRO-1": (
        4,
        "llama",
        flags(pp=2, stages="Et|ttL", strategy="optim") | NARROW | {"pipeline_schedule": "zb_h1"},
    ),
    "kept in bf16, experts": (
        2,
        "oss",
        flags(strategy="optim_grads") | NARROW | {"expert_model_parallel_size": 2},
    ),
    "remainders, two copies of the embedding, tensor parallel": (
        4,
        "gpt",
        flags(tp=2, pp=2, stages=STAGES[2, 1]) | {**AWARE, "store_param_remainders": True},
    ),
    "remainders, gradients in bf16, experts": (
        2,
        "oss",
        flags(dp=2) | {**NARROW, "store_param_remainders": True},
    ),
    "no masters, replicated, interleaved": (
        4,
        "gpt",
        flags(pp=2, dp=2, stages=STAGES[2, 2]) | {**AWARE, "main_params_dtype": "bf16"},
    ),
    "no masters, ZeRO-2, tied over stages": (
        4,
        "llama tied",
        flags(pp=2, stages=STAGES[2, 1], strategy="optim_grads")
        | {**NARROW, "main_params_dtype": "bf16"},
    ),
    "no masters, ZeRO-3, replicas": (
        4,
        "llama",
        flags(strategy="optim_grads_params", replicas=2) | {**AWARE, "main_params_dtype": "bf16"},
    ),
    "sent in bf16, summed in fp32": (
        2,
        "gpt",
        flags(dp=2, strategy="optim")
        | {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True},
    ),
}


def passes(world: int, model: str, settings: dict[str, Any], steps: int = STEPS) -> None:
    report = verify_in_pool(world, config(MODELS[model], world, **settings), steps=steps)
    assert report.passed, report.text()
    compared = {"loss", "grad", "norm", "param", "evaluation"}
    assert {*report.max_rel_error} - {"load", "further"} == compared
    assert None not in report.max_rel_error.values()


def ids(cases: list[tuple[int, dict[str, Any]]]) -> list[str]:
    return [f"{world}: {name(case)}" for world, case in cases]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize(("world", "case"), QUICK, ids=ids(QUICK))
def test_one_layout_of_each_kind(world: int, case: dict[str, Any], model: str) -> None:
    passes(world, model, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "corner",
    chosen(
        CORNERS,
        "one microbatch",
        "one microbatch, gradients reduced in its hooks",
        "a rank with nothing in all its stages",
        "an embedding alone, sharded and tensor parallel",
        "virtual stages on one rank",
        "sent in bf16, which one device does not",
        "no overlap, ZeRO-1",
        "one key/value head, a vocabulary part of padding only",
    ),
)
def test_corners(corner: str) -> None:
    passes(*CORNERS[corner])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "case"), QUICK[::2], ids=ids(QUICK[::2]))
def test_layouts_in_fp32(world: int, case: dict[str, Any]) -> None:
    passes(world, "llama tied", case | {"precision": "fp32"})


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "case"), QUICK[::3], ids=ids(QUICK[::3]))
def test_layouts_in_bf16_are_as_close_as_one_device(world: int, case: dict[str, Any]) -> None:
    passes(world, "gpt", case | {"precision": "bf16"})


@pytest.mark.slow
@pytest.mark.parametrize("corner", chosen(BF16_CORNERS, "kept in bf16, ZeRO-2, replicas"))
def test_corners_of_bf16(corner: str) -> None:
    world, model, settings = BF16_CORNERS[corner]
    passes(world, model, settings | {"precision": "bf16"})


def test_replicas_that_drift_apart_in_the_last_bit_fail() -> None:
    settings = config(MODELS["llama"], **flags(tp=2))
    report = verify_in_pool(2, settings, None, _with_a_nudge)
    assert not report.passed and report.diverged == ("norm.weight",)
    assert max(error or 0.0 for error in report.max_rel_error.values()) < 1e-12


def _with_a_nudge(rank: int, world_size: int, *arguments: Any) -> VerifyReport | None:
    apply = Engine.apply

    def nudged(engine: Engine, result: StepResult) -> None:
        apply(engine, result)
        weight = local_tensor(engine.parameters["norm.weight"])
        weight[rank] = weight[rank].nextafter(weight[rank] + 1)

    with patch.object(Engine, "apply", nudged):
        return compare_on_rank(rank, world_size, *arguments)


def every_layout() -> list[tuple[int, str, dict[str, Any]]]:
    """Every layout with each of the two model families."""
    return [
        (world, TIED[family] if index % 2 else family, case)
        for index, (world, case) in enumerate(EVERY)
        for family in TIED
    ]


def layouts(cases: list[tuple[int, str, dict[str, Any]]]) -> Any:
    return pytest.mark.parametrize(
        ("world", "model", "case"),
        [pytest.param(*case, id=f"{case[0]}: {case[1]} {name(case[2])}") for case in cases],
    )


@pytest.mark.exhaustive
@layouts(every_layout())
def test_every_layout(world: int, model: str, case: dict[str, Any]) -> None:
    passes(world, model, case)
