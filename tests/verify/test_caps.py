"""Capped scores and logits, in layouts against one device."""

from dataclasses import replace
from typing import Any

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from tests.verify.cases import LLAMA, MODELS, chosen, config, flags, named
from tests.verify.test_layouts import passes

# Below most scores and logits of these models, so that a cap left out would show.
CAPS: dict[str, Any] = {"attn_logit_softcapping": 0.3, "final_logit_softcapping": 0.2}
PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}
LINEAR: dict[str, Any] = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ring, sinks, windows, documents": (2, "sinks", named(cp=2, cp_comm_type=("p2p",)) | PACKED),
    "longer ring": (4, "sinks", named(cp=4, cp_comm_type=("p2p",)) | PACKED),
    "gathered, positions divided": (
        2,
        "llama",
        named(cp=2, cp_comm_type=("all_gather",), use_rope_scaling=False)
        | {"rotary_seq_len_interpolation_factor": 2.5},
    ),
    "Ulysses, dropout": (2, "gpt", named(cp=2, cp_comm_type=("a2a",), attention_dropout=0.1)),
    "hierarchical": (
        4,
        "llama",
        named(cp=4, cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(2, 2)),
    ),
    "latents gathered": (2, "latent", named(cp=2, cp_comm_type=("all_gather",))),
    "slices of sequences, stages": (
        2,
        "llama",
        flags(pp=2, stages="Et|t*2L")
        | {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2}
        | LINEAR,
    ),
    "loss without logits, split vocabulary, smoothed, MTP": (
        2,
        "llama tied",
        flags(tp=2, sequence=True)
        | LINEAR
        | {"label_smoothing": 0.1, "z_loss_coeff": 0.1, "mtp_num_layers": 2},
    ),
    "attention again, ZeRO-3": (
        2,
        "sinks",
        flags(dp=2, strategy="optim_grads_params")
        | {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(LAYOUTS, "ring, sinks, windows, documents"))
def test_layouts_cap_as_one_device_does(name: str) -> None:
    world, model, settings = LAYOUTS[name]
    passes(world, model, CAPS | settings, steps=1)


def test_two_ways_to_stretch_positions_are_refused() -> None:
    by = {"rotary_seq_len_interpolation_factor": 4.0}
    for name, value in (("use_rope_scaling", True), ("rope_type", "yarn")):
        model = replace(LLAMA, use_rope_scaling=False)
        with pytest.raises(ConfigError, match="both stretch RoPE"):
            check(config(model, **by, **{name: value}), 1)
    with pytest.raises(ConfigError, match="needs position_embedding_type rope"):
        check(config(MODELS["gpt"], **by), 1)
