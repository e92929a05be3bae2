"""Attention and MLP side by side after one norm, in layouts against one device."""

from typing import Any

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from tests.verify.cases import MODELS, ONE_NORM, chosen, config, flags, named
from tests.verify.test_layouts import passes

AGAIN: dict[str, Any] = {"recompute_granularity": "selective"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tokens split, norms again": (
        2,
        flags(tp=2, sequence=True) | AGAIN | {"recompute_modules": ("layernorm",)},
    ),
    "ring, windows": (
        2,
        named(cp=2, cp_comm_type=("p2p",), window_size=3, window_attn_skip_freq="2"),
    ),
    "stages, dW later": (2, flags(pp=2, stages="Et|t*2L") | {"pipeline_schedule": "zb_h1"}),
    "ZeRO-3": (2, flags(dp=2, strategy="optim_grads_params")),
    "adapters": (2, flags(tp=2, sequence=True) | {"lora_rank": 2}),
    "8 bits": (
        2,
        flags(tp=2, sequence=True) | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(LAYOUTS, "tokens split, norms again"))
def test_layouts_normalise_once_as_one_device_does(name: str) -> None:
    world, settings = LAYOUTS[name]
    passes(world, "neox", ONE_NORM | settings, steps=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_residual": False}, "parallel_residual_one_norm"),
        ({"normalization": "RMSNorm"}, "layernorm_bias"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ("mlp_norm",)},
            "offload_modules mlp_norm tells them apart",
        ),
    ],
)
def test_what_does_not_go_with_one_norm_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(MODELS["neox"], **ONE_NORM | changes), 1)
