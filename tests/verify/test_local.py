"""Attention whose sizes differ between layers with a window and others: exact in every layout, and
as large as theory says."""

from pathlib import Path

import pytest

from tests.verify.cases import chosen, flags
from tests.verify.families import (
    BUBBLES,
    MOVED,
    Case,
    computes_what_one_device_does,
    context,
    does_what_theory_says,
    selective,
)

EXPERTS_ON_RANKS = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"}
CASES: dict[str, Case] = {
    "one device": (1, "local", flags()),
    "fewer key heads than ranks, of some layers": (4, "local", flags(tp=4, sequence=True)),
    "tensor parallel, recomputed": (
        2,
        "local",
        flags(tp=2) | {"recompute_granularity": "full"},
    ),
    "ring": (2, "local", flags() | context(2, "p2p")),
    "gathered, core recomputed": (
        4,
        "local",
        flags(dp=2, strategy="optim_grads_params")
        | context(2, "all_gather")
        | selective("core_attn", "mlp"),
    ),
    "exchanged heads": (4, "local", flags(tp=2) | context(2, "a2a")),
    "exchanged heads, fewer of some layers": (4, "local", flags() | context(4, "a2a")),
    "hierarchical": (4, "local", flags() | context(4, "a2a+p2p")),
    "moved, ZeRO-3": (
        4,
        "local",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params") | MOVED,
    ),
    "deferred weights": (4, "local", flags(tp=2, pp=2, sequence=True) | BUBBLES),
    "experts on ranks": (
        4,
        "local, experts",
        flags(tp=2, sequence=True, dp=2) | EXPERTS_ON_RANKS,
    ),
    "keys as values, fewer key heads than ranks": (
        4,
        "whole",
        flags(tp=2, sequence=True) | context(2, "p2p"),
    ),
    "keys as values, deferred weights": (4, "whole", flags(tp=2, pp=2, sequence=True) | BUBBLES),
    "keys as values, exchanged heads, ZeRO-3": (
        4,
        "whole",
        flags(dp=2, strategy="optim_grads_params") | context(2, "a2a"),
    ),
    "keys as values, gathered, recomputed": (
        4,
        "whole",
        flags(tp=2) | context(2, "all_gather") | {"recompute_granularity": "full"},
    ),
    "keys as values, moved": (2, "whole", flags(tp=2, sequence=True) | MOVED),
    "keys as values, norms and core recomputed": (
        2,
        "whole",
        flags(dp=2, strategy="optim_grads") | selective("layernorm", "core_attn"),
    ),
    "packed documents": (
        2,
        "local",
        flags(tp=2, sequence=True) | {"reset_attention_mask": True, "reset_position_ids": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, "keys as values, deferred weights"))
def test_layouts(case: str) -> None:
    computes_what_one_device_does(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [c for c in chosen(CASES, "exchanged heads") if "experts" not in str(c)],
)
def test_bytes_and_products_are_those_of_theory(case: str, tmp_path: Path) -> None:
    does_what_theory_says(CASES[case], tmp_path)
