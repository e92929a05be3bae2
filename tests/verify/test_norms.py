"""Norms before attention and MLP, after them, or both, in layouts against one device."""

from typing import Any

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from tests.verify.cases import MODELS, chosen, config, flags, named
from tests.verify.test_layouts import passes

_SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
_ALL = ("layernorm", "mlp", "core_attn")
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tensor parallel": (2, "gpt", flags(tp=2)),
    "fewer KV heads than ranks": (4, "llama tied", flags(tp=4, sequence=True)),
    "latent, stages, ZeRO-3": (
        4,
        "latent",
        flags(pp=2, dp=2, stages="E|t|t|tL", strategy="optim_grads_params")
        | {"pipeline_schedule": "zb_v"},
    ),
    "MLPs and attention again": (
        2,
        "llama",
        flags(tp=2, sequence=True) | _SELECTIVE | {"recompute_modules": ("mlp", "core_attn")},
    ),
    "whole layers again, in tiles": (
        4,
        "gpt untied",
        flags(tp=2, dp=2, sequence=True)
        | {"recompute_granularity": "full", "tiled_mlp_num_shards": 3},
    ),
    "experts, context": (4, "oss", named(ep=2, cp=2, strategy="optim")),
    "experts, attention with its norm again": (
        2,
        "oss",
        named(ep=2, overlap_moe_expert_parallel_comm=True)
        | _SELECTIVE
        | {"recompute_modules": ("a2a_overlap_attn", "a2a_overlap_post_attn")},
    ),
    "MTP": (2, "llama tied", flags(tp=2, sequence=True) | {"mtp_num_layers": 2}),
    "adapters with magnitudes": (2, "llama", flags(tp=2) | {"lora_rank": 2, "use_dora": True}),
    "8 bits": (2, "llama", flags(tp=2) | {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"}),
}
CASES = [(name, placement) for name in LAYOUTS for placement in ("after", "both")]
IN_THE_GATE = (("experts, attention with its norm again", "after"),)


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, *IN_THE_GATE), ids=str)
def test_layouts_normalise_what_is_added(case: tuple[str, str]) -> None:
    name, placement = case
    world, model, settings = LAYOUTS[name]
    passes(world, model, settings | {"norm_placement": placement}, steps=1)


TOGETHER: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tensor parallel": (2, "llama", flags(tp=2)),
    "a key head of two ranks": (
        4,
        "llama tied",
        flags(tp=4, sequence=True) | {"num_query_groups": 2},
    ),
    "a key head of two ranks, ZeRO-3": (
        8,
        "llama tied",
        flags(tp=4, dp=2, sequence=True, strategy="optim_grads_params") | {"num_query_groups": 2},
    ),
    "a key head of all ranks, stages": (
        8,
        "gpt",
        flags(tp=4, pp=2, sequence=True) | {"num_query_groups": 1},
    ),
    "layers again": (2, "llama", flags(tp=2) | {"recompute_granularity": "full"}),
    "heads for tokens": (4, "gpt", named(tp=2, cp=2, cp_comm_type=("a2a",))),
    "slices": (
        4,
        "llama",
        flags(tp=2, pp=2) | {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2},
    ),
    "experts, adapters": (4, "oss", named(tp=2, ep=2, lora_rank=2, use_dora=True)),
    "bf16": (4, "llama", named(tp=2, precision="bf16", strategy="optim")),
    "compiled": (2, "llama", flags(tp=2) | {"compile": True, "compile_backend": "eager"}),
}
CENTRED = [(name, centred) for name in TOGETHER for centred in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CENTRED, ("a key head of two ranks", True)), ids=str)
def test_layouts_normalise_all_heads_together(case: tuple[str, bool]) -> None:
    name, centred = case
    world, model, settings = TOGETHER[name]
    together = {"qk_layernorm": True, "qk_layernorm_type": "all_heads"}
    passes(world, model, settings | together | {"apply_layernorm_1p": centred}, steps=1)


def test_norms_that_are_not_there_are_not_discarded_or_moved() -> None:
    model = MODELS["llama"]
    discards: dict[str, Any] = _SELECTIVE | {"recompute_modules": _ALL}
    moves: dict[str, Any] = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("attn_norm", "core_attn"),
    }
    made: dict[str, Any] = moves | {
        "offload_modules": ("core_attn",),
        "offload_tensors": ("pre_mlp_layernorm_output",),
    }
    beside = {"parallel_residual": True}
    fused = {"fused_residual_rmsnorm": True}
    for settings in (discards, moves, made, beside, fused):
        check(config(model, norm_placement="both", **settings), 1)
        with pytest.raises(ConfigError, match="norm_placement after"):
            check(config(model, norm_placement="after", **settings), 1)
