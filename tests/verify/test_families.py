"""Attention sinks, windows in some layers, GPT-NeoX's layers: exact in every layout, and as large
as theory says."""

from pathlib import Path

import pytest

from tests.verify.cases import chosen, flags
from tests.verify.families import (
    BUBBLES,
    DROP,
    MOVED,
    Case,
    computes_what_one_device_does,
    context,
    does_what_theory_says,
    selective,
)

CASES: dict[str, Case] = {
    "sinks": (1, "sinks", flags()),
    "sinks, tensor parallel, dropout": (2, "sinks", flags(tp=2) | DROP),
    "sinks, sequence parallel": (4, "sinks", flags(tp=4, sequence=True)),
    "sinks, ring": (2, "sinks", flags() | context(2, "p2p")),
    "sinks, gathered, dropout": (2, "sinks", flags() | context(2, "all_gather") | DROP),
    "sinks, exchanged heads": (4, "sinks", flags(tp=2) | context(2, "a2a")),
    "sinks, hierarchical": (4, "sinks", flags() | context(4, "a2a+p2p")),
    "sinks of latents, gathered": (
        4,
        "latent",
        flags(tp=2) | context(2, "all_gather") | {"softmax_type": "learnable"},
    ),
    "sinks, attention recomputed, ZeRO-3": (
        4,
        "sinks",
        flags(dp=2, strategy="optim_grads_params")
        | context(2, "p2p")
        | selective("core_attn", "mlp"),
    ),
    "sinks, moved": (2, "sinks", flags(tp=2, sequence=True) | MOVED),
    "sinks, deferred weights": (4, "sinks", flags(tp=2, pp=2, sequence=True) | BUBBLES),
    "gpt-oss, experts on ranks, sequence parallel": (
        4,
        "oss",
        flags(tp=2, sequence=True, dp=2)
        | {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"},
    ),
    "gpt-oss, experts split, ring": (
        4,
        "oss",
        context(4, "p2p")
        | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
        | selective("moe_act", "core_attn"),
    ),
    "neox, dropped": (1, "neox", flags()),
    "neox, tensor parallel": (2, "neox", flags(tp=2)),
    "neox, sequence parallel, recomputed": (
        2,
        "neox",
        flags(tp=2, sequence=True) | {"recompute_granularity": "full"},
    ),
    "neox, norms recomputed": (2, "neox", flags(tp=2) | selective("layernorm", "mlp")),
    "neox, moved, ring": (2, "neox", flags() | MOVED | context(2, "p2p")),
    "neox, deferred weights, ZeRO-2": (
        4,
        "neox",
        flags(pp=2, dp=2, strategy="optim_grads") | BUBBLES,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "sinks, hierarchical",
        "gpt-oss, experts split, ring",
        "neox, deferred weights, ZeRO-2",
    ),
)
def test_layouts(case: str) -> None:
    computes_what_one_device_does(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in chosen(CASES, *list(CASES)[::6]) if "experts" not in str(c)]
)
def test_bytes_and_products_are_those_of_theory(case: str, tmp_path: Path) -> None:
    does_what_theory_says(CASES[case], tmp_path)
