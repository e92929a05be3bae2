"""QK-clip in layouts whose ranks know some of the logits and hold parts of the weights, against one
device that makes all S x S logits."""

from typing import Any

import pytest

from tests.verify.cases import chosen, flags, named
from tests.verify.test_layouts import passes

LIMIT = 0.4
"""Some heads' largest logits are above it, and others' below."""
CLIP: dict[str, Any] = {"qk_clip": True, "qk_clip_threshold": LIMIT, "qk_clip_alpha": 0.3}
PLAIN: dict[str, Any] = {"qk_layernorm": False}
PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}
HOST: dict[str, Any] = {"optimizer_cpu_offload": True}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "alone": (1, "llama", PLAIN),
    "alone, latent": (1, "latent", {}),
    "documents": (1, "sinks", PACKED | {"micro_batch_size": 2}),
    "fewer KV heads than ranks": (4, "llama", PLAIN | flags(tp=4, sequence=True)),
    "latent, parts of heads in shards": (
        4,
        "latent",
        flags(tp=2, dp=2, sequence=True, strategy="optim_grads_params") | {"optimizer": "muon"},
    ),
    "more shards than rows": (8, "latent", flags(dp=8, strategy="optim_grads")),
    "stages, gathered beside the update": (
        4,
        "latent, plain queries",
        flags(pp=2, dp=2, strategy="optim")
        | {"overlap_param_gather_with_optimizer_step": True, "attn_logit_softcapping": None},
    ),
    "two copies of the model": (
        4,
        "llama",
        PLAIN | flags(pp=2, dp=2) | {"pipeline_schedule": "dualpipe", "micro_batch_size": 1},
    ),
    "ring, windows, sinks, documents": (2, "sinks", named(cp=2, cp_comm_type=("p2p",)) | PACKED),
    "gathered": (4, "llama", PLAIN | named(cp=2, cp_comm_type=("all_gather",))),
    "latents gathered": (2, "latent", named(cp=2, cp_comm_type=("all_gather",))),
    "Ulysses, dropout": (2, "gpt", named(cp=2, cp_comm_type=("a2a",))),
    "hierarchical": (
        4,
        "latent",
        named(cp=4, cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(2, 2)),
    ),
    "slices of sequences": (
        2,
        "llama",
        PLAIN
        | flags(pp=2, stages="Et|t*2L")
        | {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2},
    ),
    "further predictions of one layer, recomputed": (
        2,
        "latent",
        named(tp=2, mtp_num_layers=2, mtp_use_repeated_layer=True, recompute_granularity="full"),
    ),
    "masters on the host, ZeRO-3": (
        2,
        "latent",
        HOST | flags(dp=2, strategy="optim_grads_params"),
    ),
    "weights and masters in files": (
        2,
        "latent",
        HOST | flags(dp=2, strategy="optim_grads_params"),
    ),
    "Muon, experts": (4, "oss", named(ep=2, strategy="optim", optimizer="muon")),
    "gates, linear attention, tensor parallel": (2, "delta", PLAIN | flags(tp=2)),
    "Mamba, tensor parallel": (4, "hybrid", PLAIN | flags(tp=2, sequence=True)),
    "compiled": (2, "latent", named(tp=2, compile=True, compile_backend="aot_eager")),
}
IN_THE_GATE = ("latent, parts of heads in shards", "ring, windows, sinks, documents")


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(LAYOUTS, *IN_THE_GATE))
def test_layouts_clip_as_one_device_does(name: str) -> None:
    world, model, settings = LAYOUTS[name]
    passes(world, model, CLIP | settings)
