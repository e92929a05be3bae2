"""Attention to chosen tokens in every layout computes what one device computes, and does what
theory says."""

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

OF_CHOSEN = "sparse, latents of chosen"
ALONE, NOT_TAUGHT = "sparse, chosen alone, plain queries", "sparse, experts, not taught"
OF_SPARSE = {"offload_modules": ("attn_norm", "core_attn", "attn_proj", "mlp_norm")}
ADAPTERS = {"lora_rank": 3}
CASES: dict[str, Case] = {
    "alone": (1, "sparse", flags()),
    "ZeRO-3, packed": (
        2,
        "sparse",
        flags(dp=2, strategy="optim_grads_params") | {"reset_attention_mask": True},
    ),
    "tensor parallel, chosen alone": (2, ALONE, flags(tp=2)),
    "sequence parallel, packed": (
        2,
        "sparse",
        flags(tp=2, sequence=True) | {"reset_attention_mask": True, "micro_batch_size": 2},
    ),
    "deferred weights, sequence parallel": (
        4,
        "sparse, experts",
        flags(tp=2, pp=2, sequence=True) | BUBBLES,
    ),
    "expert parallel, not taught": (2, NOT_TAUGHT, flags(dp=2) | {"expert_model_parallel_size": 2}),
    "experts, ZeRO-2, all of a few tokens": (
        4,
        "sparse, experts",
        flags(dp=4, strategy="optim_grads")
        | {"expert_model_parallel_size": 2, "dsa_indexer_topk": 16},
    ),
    "ZeRO-1, layers recomputed": (
        4,
        ALONE,
        flags(tp=2, dp=2, sequence=True, strategy="optim") | {"recompute_granularity": "full"},
    ),
    "every module": (
        2,
        "sparse",
        flags(tp=2, sequence=True) | selective("core_attn", "mlp", "layernorm", "mla_up_proj"),
    ),
    "moved": (2, "sparse", flags(tp=2) | MOVED | OF_SPARSE),
    "latents, alone": (1, OF_CHOSEN, {"micro_batch_size": 2}),
    "latents, sequence parallel, packed": (
        2,
        OF_CHOSEN,
        flags(tp=2, sequence=True) | {"reset_attention_mask": True, "micro_batch_size": 2},
    ),
    "latents, context parallel, packed": (
        4,
        OF_CHOSEN,
        flags(tp=2) | context(2, "all_gather") | {"reset_attention_mask": True},
    ),
    "latents, deferred weights, core recomputed": (
        4,
        OF_CHOSEN,
        flags(tp=2, pp=2, sequence=True) | BUBBLES | selective("core_attn"),
    ),
    "latents, moved": (2, OF_CHOSEN, flags(tp=2) | MOVED | OF_SPARSE),
    "latents, layers recomputed, a batch of two": (
        2,
        OF_CHOSEN,
        flags(dp=2, strategy="optim_grads_params")
        | {"recompute_granularity": "full", "micro_batch_size": 2},
    ),
    "latents of frozen weights": (
        2,
        NOT_TAUGHT,
        flags(tp=2, sequence=True) | ADAPTERS | {"lora_target_modules": ("q_b_proj", "o_proj")},
    ),
    "adapters": (
        4,
        NOT_TAUGHT,
        flags(tp=2, sequence=True, strategy="optim_grads_params")
        | ADAPTERS
        | selective("core_attn", "mla_up_proj"),
    ),
    "adapters, deferred weights": (2, "sparse, not taught", flags(pp=2) | ADAPTERS | BUBBLES),
    "adapters, whole tokens, layers recomputed": (
        2,
        "sparse, not taught",
        flags(tp=2) | ADAPTERS | {"use_dora": True, "recompute_granularity": "full"},
    ),
    "context parallel": (2, "sparse", context(2, "all_gather")),
    "context parallel, packed, chosen alone": (
        4,
        ALONE,
        context(4, "all_gather") | {"reset_attention_mask": True, "micro_batch_size": 2},
    ),
    "context, sequence parallel, pipeline, packed": (
        8,
        "sparse, experts",
        flags(tp=2, pp=2, sequence=True)
        | BUBBLES
        | context(2, "all_gather")
        | {"reset_attention_mask": True},
    ),
    "context parallel, ZeRO-3, experts": (
        8,
        "sparse, experts",
        flags(dp=2, tp=2, sequence=True, strategy="optim_grads_params")
        | {"expert_model_parallel_size": 4}
        | context(2, "all_gather"),
    ),
    "context parallel, core recomputed, moved": (
        4,
        "sparse",
        flags(tp=2) | context(2, "all_gather") | selective("core_attn"),
    ),
    "context parallel, ZeRO-2, layers recomputed": (
        4,
        NOT_TAUGHT,
        flags(dp=2, strategy="optim_grads")
        | context(2, "all_gather")
        | {"recompute_granularity": "full", "reset_attention_mask": True},
    ),
}


BOTH = "latents, context parallel, packed"


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, *list(CASES)[2:5:2], BOTH))
def test_layouts(case: str) -> None:
    computes_what_one_device_does(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, "every module", BOTH))
def test_bytes_and_products_are_those_of_theory(case: str, tmp_path: Path) -> None:
    does_what_theory_says(CASES[case], tmp_path)
