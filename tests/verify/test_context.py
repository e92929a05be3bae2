"""Context parallelism computes what one device computes, alone and with everything else."""

from typing import Any

import pytest

from tests.verify.cases import STAGES, chosen, flags
from tests.verify.test_layouts import passes

KINDS: dict[str, dict[str, Any]] = {
    "p2p": {"cp_comm_type": ("p2p",)},
    "all_gather": {"cp_comm_type": ("all_gather",)},
    "a2a": {"cp_comm_type": ("a2a",)},
    "a2a+p2p": {"cp_comm_type": ("a2a+p2p",)},
}
WHOLE = {"reset_attention_mask": False}  # rows of one document: rings, and dense gathers
WINDOW = {"window_size": 3}
UNCUT = {"pipeline_model_parallel_layout": None, "num_layers": 4, "micro_batch_size": 1}


def context(cp: int, kind: str, **more: Any) -> dict[str, Any]:
    """The settings of `cp` ranks in one of the four ways."""
    sizes = {"hierarchical_context_parallel_sizes": (2, cp // 2)} if kind == "a2a+p2p" else {}
    return {"context_parallel_size": cp} | KINDS[kind] | sizes | more


# (ranks, model, settings); each kind alone, and with each other technique at least once.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "p2p, two rows": (2, "llama", context(2, "p2p", micro_batch_size=2, **WHOLE)),
    "p2p, packed, dropout": (4, "gpt", context(4, "p2p")),
    "all_gather, dropout": (4, "gpt", context(4, "all_gather", **WHOLE)),
    "all_gather, packed": (2, "llama", context(2, "all_gather", micro_batch_size=2)),
    "a2a, packed, dropout": (4, "gpt", context(4, "a2a", micro_batch_size=2)),
    "a2a, more ranks than key/value heads": (4, "llama", context(4, "a2a", **WHOLE)),
    "a2a+p2p": (4, "llama tied", context(4, "a2a+p2p", **WHOLE)),
    "a2a+p2p, packed, dropout": (4, "gpt", context(4, "a2a+p2p")),
    "windows": (4, "llama", context(4, "p2p", **WINDOW, **WHOLE)),
    "windows in documents": (4, "llama", context(4, "all_gather", **WINDOW)),
    "one kind for each layer": (
        4,
        "llama",
        context(4, "a2a+p2p")
        | {"num_layers": 4, "cp_comm_type": ("p2p", "a2a", "a2a+p2p", "all_gather")}
        | WINDOW,
    ),
    "heads that nothing divides": (
        4,
        "llama",
        context(4, "p2p", num_attention_heads=5, num_query_groups=5, **WHOLE),
    ),
    "tp": (4, "gpt", flags(tp=2) | context(2, "a2a")),
    "tp + sp": (4, "llama", flags(tp=2, sequence=True) | context(2, "p2p", **WHOLE)),
    "tp over all key/value heads": (
        8,
        "llama",
        flags(tp=4, sequence=True) | context(2, "all_gather"),
    ),
    "pp": (4, "gpt", flags(pp=2) | context(2, "p2p", **WHOLE)),
    "interleaved pp": (4, "llama tied", flags(pp=2, stages=STAGES[2, 2]) | context(2, "a2a")),
    "dp, replicated": (4, "llama", flags(dp=2) | context(2, "p2p")),
    "optim, dp = 1": (2, "gpt", flags(strategy="optim") | context(2, "p2p", **WHOLE)),
    "optim_grads": (4, "llama", flags(dp=2, strategy="optim_grads") | context(2, "all_gather")),
    "optim_grads_params": (
        4,
        "llama tied",
        flags(dp=2, strategy="optim_grads_params") | context(2, "p2p", **WHOLE),
    ),
    "hsdp": (4, "gpt", flags(dp=2, strategy="optim", replicas=2) | context(2, "a2a")),
    "zero bubbles": (
        4,
        "gpt",
        flags(pp=2) | {"pipeline_schedule": "zb_v", **UNCUT} | context(2, "p2p", **WHOLE),
    ),
    "two copies of the model": (
        4,
        "llama",
        flags(pp=2) | {"pipeline_schedule": "dualpipe", **UNCUT} | context(2, "a2a"),
    ),
    "recomputed whole": (
        2,
        "llama",
        {"recompute_granularity": "full", "recompute_method": "uniform"}
        | {"recompute_num_layers": (1,)}
        | context(2, "p2p", **WHOLE),
    ),
    "attention recomputed": (
        2,
        "gpt",
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
        | context(2, "a2a"),
    ),
    "norms recomputed, loss fused": (
        2,
        "llama",
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
        | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
        | context(2, "all_gather"),
    ),
    "attention offloaded": (
        2,
        "llama",
        {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}
        | {"min_offloaded_tensor_size": 1}
        | context(2, "p2p"),
    ),
    "everything": (
        8,
        "llama",
        flags(tp=2, pp=2, sequence=True, strategy="optim") | context(2, "p2p", **WHOLE),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "a2a, more ranks than key/value heads",
        "one kind for each layer",
        "heads that nothing divides",
    ),
)
def test_layouts(case: str) -> None:
    passes(*CASES[case], steps=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_in_fp32(kind: str) -> None:
    passes(4, "llama tied", context(4, kind, precision="fp32"), steps=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["p2p", "a2a+p2p"])
def test_layouts_in_bf16_are_as_close_as_one_device(kind: str) -> None:
    passes(4, "gpt", context(4, kind, precision="bf16", **WHOLE), steps=1)


GRIDS = {
    "cp8": (8, flags(), 8),
    "cp4 tp2": (8, flags(tp=2), 4),
    "cp4 tp2 sp": (8, flags(tp=2, sequence=True), 4),
    "cp4 pp2": (8, flags(pp=2), 4),
    "cp2 pp2 tp2 sp": (8, flags(pp=2, tp=2, sequence=True), 2),
    "cp2 pp4": (8, flags(pp=4, stages=STAGES[4, 2]) | {"micro_batch_size": 1}, 2),
    "cp4 dp2": (8, flags(dp=2, strategy="optim_grads_params"), 4),
    "cp2 dp4 hsdp": (8, flags(dp=4, strategy="optim_grads", replicas=2), 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("seen", [{}, WHOLE, WINDOW], ids=["packed", "whole", "windows"])
@pytest.mark.parametrize("shared", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_kind_in_every_layout(
    grid: str, kind: str, shared: int, seen: dict[str, Any]
) -> None:
    world, layout, cp = GRIDS[grid]
    heads = {"num_attention_heads": 16, "num_query_groups": 16 // shared}
    passes(world, "llama", layout | context(cp, kind) | heads | seen, steps=1)
