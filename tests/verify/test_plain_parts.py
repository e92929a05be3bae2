"""Norms without weights, norms of embeddings, bounds of projections, biases of MLPs and of the
output layer, in layouts against one device."""

from typing import Any

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from tests.verify.cases import MODELS, chosen, config, flags, named
from tests.verify.test_layouts import passes

AGAIN: dict[str, Any] = {"recompute_granularity": "selective"}
LINEAR: dict[str, Any] = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tokens split, fewer keys than ranks, norms again": (
        4,
        "bare",
        flags(tp=4, sequence=True) | AGAIN | {"recompute_modules": ("layernorm",)},
    ),
    "stages, dW later, loss without logits": (
        2,
        "bare",
        flags(pp=2, stages="Et|t*2L") | {"pipeline_schedule": "zb_h1"} | LINEAR,
    ),
    "split vocabulary without logits, predictions, tied": (
        4,
        "bare, LayerNorm, tied",
        flags(tp=2, pp=2, sequence=True, stages="Et|ttmmL")
        | LINEAR
        | {"mtp_num_layers": 2, "hidden_dropout": 0.1, "embedding_dropout": 0.2},
    ),
    "ZeRO-3, fused, attention again": (
        2,
        "bare",
        flags(dp=2, strategy="optim_grads_params")
        | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
        | {"recompute_granularity": "full", "recompute_method": "uniform"},
    ),
    "heads exchanged": (2, "bare", named(cp=2, cp_comm_type=("a2a",))),
    "ring, Muon": (2, "bare", named(cp=2, cp_comm_type=("p2p",)) | {"optimizer": "muon"}),
    "side by side, tokens split": (4, "phi", flags(tp=2, dp=2, sequence=True)),
    "side by side, stages": (4, "phi", flags(tp=2, pp=2, stages="Et|t*2L") | LINEAR),
    "side by side, ZeRO-2 of copies": (4, "phi", flags(dp=4, strategy="optim_grads")),
    "positions from the third row": (
        4,
        "gpt, positions from the third row",
        flags(tp=2, dp=2, sequence=True, strategy="optim_grads_params")
        | {"bias_dropout_fusion": True},
    ),
    "adapters": (2, "phi", flags(tp=2, sequence=True) | {"lora_rank": 2}),
    "adapters, without weights of norms": (
        4,
        "bare",
        flags(tp=2, pp=2, sequence=True) | {"lora_rank": 2},
    ),
    "8 bits": (
        2,
        "phi",
        flags(tp=2, sequence=True) | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    chosen(
        LAYOUTS,
        "split vocabulary without logits, predictions, tied",
        "side by side, tokens split",
    ),
)
def test_layouts_compute_them_as_one_device_does(name: str) -> None:
    world, model, settings = LAYOUTS[name]
    passes(world, model, settings, steps=1)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("bare", {"apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ("bare, LayerNorm, tied", {"layernorm_bias": False}, "layernorm_bias"),
        ("latent", {"clip_qkv": 8.0}, "clip_qkv clips queries, keys and values"),
        ("llama", {"mlp_bias": True, "num_experts": 4}, "mlp_bias is for dense MLPs"),
        (
            "bare",
            {"optimizer": "muon", "qk_clip": True, "qk_l2_norm": False},
            "clip_qkv bounds what scaled weights make",
        ),
    ],
)
def test_what_does_not_go_with_them_is_refused(
    model: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(MODELS[model], **changes), 1)
