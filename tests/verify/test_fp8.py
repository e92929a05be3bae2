"""8-bit layers in every kind of layout compute what one device computes with the same rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fivefold.check import check
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError
from fivefold.model.compiled import compile_layers
from fivefold.model.eight_bit.fp8 import E5M2, RECIPES
from fivefold.model.eight_bit.layers import install_eight_bit
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.eight_bit.rules import check_kernels
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.verify.shrink import prepare
from tests.model.models import batch_of
from tests.verify.cases import MIXTURE, MODELS, STEPS, chosen, config, flags, named, verify_in_pool

HYBRID = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
MIXED = replace(MIXTURE, mtp_num_layers=1, moe_shared_expert_gate=True)
DEFERRED = flags(tp=2, pp=2, stages="Et|ttL", sequence=True) | {
    "pipeline_schedule": "zb_h1",
    "micro_batch_size": 1,
}
GATHERED_AND_MOVED = {
    "data_parallel_sharding_strategy": "optim",
    "fp8_param_gather": True,
    "fine_grained_activation_offloading": True,
    "offload_modules": ("core_attn", "attn_proj"),
    "min_offloaded_tensor_size": 1,
}
CASES: dict[str, tuple[int, ModelConfig, dict[str, Any]]] = {
    "deferred weights": (4, MODELS["llama tied"], DEFERRED),
    "ZeRO-3, recomputed, dropout": (
        2,
        MODELS["gpt"],
        flags(strategy="optim_grads_params")
        | {
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mlp", "layernorm"),
        },
    ),
    "latents, ring, offloaded": (
        2,
        MODELS["latent, plain queries"],
        flags()
        | {
            "context_parallel_size": 2,
            "cp_comm_type": ("p2p",),
            "fine_grained_activation_offloading": True,
            "offload_modules": ("core_attn", "attn_proj"),
            "min_offloaded_tensor_size": 1,
        },
    ),
    "parts": (
        2,
        MODELS["gpt"],
        flags(tp=2, sequence=True) | {"tp_comm_overlap": True, "fp8_recipe": "rowwise"},
    ),
    "tiles": (
        2,
        MODELS["llama tied"],
        flags(tp=2, sequence=True)
        | {
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "mlp"),
            "tiled_mlp_num_shards": 3,
        },
    ),
    "experts": (4, MIXED, named(ep=2, tp=2, strategy="optim")),
    "gathered in 8 bits, ZeRO-3, experts": (
        4,
        MIXED,
        named(ep=2, strategy="optim_grads_params") | {"fp8_param_gather": True},
    ),
    "gathered in 8 bits, deferred, offloaded": (
        4,
        MODELS["llama tied"],
        DEFERRED
        | GATHERED_AND_MOVED
        | {"tensor_model_parallel_size": 1, "sequence_parallel": False},
    ),
    "gathered in 8 bits, deferred, offloaded, tensor parallel": (
        8,
        MODELS["llama tied"],
        DEFERRED | GATHERED_AND_MOVED,
    ),
    "gathered in 8 bits, optimizer on the host": (
        4,
        MODELS["latent"],
        flags(tp=2, strategy="optim_grads_params")
        | {
            "fp8_param_gather": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.6,
        },
    ),
    "ends in bf16, interleaved, ZeRO-3": (
        8,
        replace(MIXED, first_last_layers_bf16=True),
        named(ep=2, tp=2, pp=2, strategy="optim_grads_params")
        | {
            "fp8_param_gather": True,
            "pipeline_model_parallel_layout": "E|t|t|tmL",
            "num_layers_at_start_in_bf16": 0,
            "num_layers_at_end_in_bf16": 2,
        },
    ),
    "ends in bf16, deferred, recomputed": (
        2,
        replace(
            MODELS["gpt"],
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=2,
            num_layers_at_end_in_bf16=0,
        ),
        named(
            pp=2,
            pipeline_schedule="zb_v",
            pipeline_model_parallel_layout="v:E|t|t|tL",
            recompute_granularity="selective",
            recompute_modules=("mlp", "layernorm"),
        ),
    ),
    "experts deferred and recomputed": (
        4,
        MIXTURE,
        named(
            ep=2,
            pp=2,
            pipeline_schedule="zb_h1",
            pipeline_model_parallel_layout="Et|ttL",
            recompute_granularity="selective",
            recompute_modules=("moe_act", "layernorm"),
        ),
    ),
}


@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "tiles",
        "gathered in 8 bits, deferred, offloaded",
        "ends in bf16, deferred, recomputed",
    ),
)
def test_layouts_round_alike(case: str) -> None:
    world, model, settings = CASES[case]
    report = verify_in_pool(world, config(model, world, **HYBRID | settings))
    assert report.passed, report.text()


LATE = {
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 2,
    "fp8_amax_compute_algo": "max",
    "fp8_margin": 1,
}
COPIES = flags(pp=2, stages="Et|ttL") | {
    "pipeline_schedule": "dualpipe",
    "micro_batch_size": 1,
}
LATE_CASES = CASES | {
    "two copies, replicas": (4, MODELS["llama tied"], COPIES),
    "experts split, ring": (4, MIXED, named(ep=2, cp=2, etp=1, strategy="optim_grads")),
    "products in parts": (
        4,
        MODELS["gpt"],
        flags(tp=2, sequence=True) | {"tp_comm_overlap": True},
    ),
}


@pytest.mark.parametrize(
    "case",
    chosen(
        LATE_CASES,
        "deferred weights",
        "experts deferred and recomputed",
    ),
)
def test_delayed_scales_are_those_of_one_device(case: str) -> None:
    """As they are in training: no cut of a tensor changes what all its ranks have seen."""
    world, model, settings = LATE_CASES[case]
    settings = HYBRID | settings | LATE  # of two steps before
    report = verify_in_pool(world, config(model, world, **settings), steps=STEPS)
    assert report.passed, report.text()


@pytest.mark.exhaustive
def test_a_compiled_layer_is_one_graph() -> None:
    model, losses, grads = replace(MODELS["llama"], num_layers=1), [], []
    for compiled in (False, True):
        stage = Stage(model, StageSpec(True, (0,), True))
        initialise(stage, seed=1)
        install_eight_bit(
            stage, EightBit(RECIPES["tensorwise"], torch.float32, E5M2), MemoryConfig()
        )
        if compiled:
            torch.compiler.reset()  # of what other tests compiled
            counters.clear()
            compile_layers(stage, "aot_eager")
        loss = stage(None, batch_of(model, [[16], [16]]))
        loss.backward()
        losses.append(loss.detach())
        grads.append([parameter.grad for parameter in stage.parameters()])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


def _refusal(world: int, model: ModelConfig, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(check(config(model, world, **HYBRID | settings), world))
    return str(caught.value)


def test_what_would_not_be_trained_as_it_says_is_refused() -> None:
    late = flags() | {"fp8_recipe": "delayed"}
    assert "--fp8-recipe tensorwise" in _refusal(1, MODELS["llama"], late | {"compile": True})
    refusal = _refusal(1, MODELS["llama"], late | {"fp8_margin": 18})
    assert "up to 17" in refusal and "--fp8-margin 17" in refusal
    assert "fp8_amax_history_len must be at least 1" in _refusal(
        1, MODELS["llama"], late | {"fp8_amax_history_len": 0}
    )
    assert "--fp8-recipe delayed" in _refusal(1, MODELS["llama"], flags() | {"fp8_margin": 1})
    for recipe in ("blockwise", "mxfp8"):
        blocks = _refusal(1, MODELS["llama"], flags() | {"fp8_recipe": recipe})
        assert "no kernel multiplies e5m2" in blocks and "works: --fp8-format e4m3" in blocks
    gathered = {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)}
    assert "--cp-comm-type p2p" in _refusal(2, MODELS["latent"], flags() | gathered)
    moved = {"fine_grained_activation_offloading": True, "offload_modules": ()}
    moved |= {"offload_tensors": ("dispatched_input",)}
    assert "offload_tensors dispatched_input would move" in _refusal(
        2, MIXTURE, named(ep=2, **moved)
    )
    parts = flags(tp=2, sequence=True) | {"tp_comm_overlap": True}
    refusal = _refusal(2, MODELS["llama tied"], parts)
    assert "works: --no-tp-comm-overlap | --fp8-recipe rowwise" in refusal
    assert "--fp4-format none" in _refusal(1, MODELS["llama"], flags() | {"fp4_format": "e2m1"})
    assert "--precision fp64" in _refusal(1, MODELS["llama"], flags() | {"precision": "fp32"})


def test_a_gpu_without_the_kernel_is_refused_before_ranks_start() -> None:
    narrow = config(MODELS["llama"], 1, fp8_format="e4m3", fp8_recipe="mxfp8", precision="bf16")
    check_kernels(narrow, (10, 0))
    check_kernels(narrow, None)  # CPUs have the twin
    check_kernels(narrow.with_values(fp8_format=None), (8, 0))
    for older, works in (((9, 0), "--fp8-recipe blockwise"), ((8, 9), "--fp8-recipe tensorwise")):
        with pytest.raises(ConfigError, match=r"from sm 10\.0") as caught:
            check_kernels(narrow, older)
        assert works in str(caught.value)


def test_ranks_do_not_share_a_head_whose_gradient_they_would_round_in_parts() -> None:
    settings = flags(tp=4, sequence=True) | HYBRID
    layout, changes = prepare(check(config(MODELS["llama"], **settings), 4))
    assert layout.config.model.num_kv_heads == 4
    assert any("2 key/value heads -> 4" in change for change in changes)
