"""Layers with linear attention or Mamba-2, and gates of attention's output: exact in every layout,
and as large as theory says."""

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

FULL = {"recompute_granularity": "full"}
ONES = {"reset_attention_mask": True, "document_length": 1}
FURTHER = {"mtp_num_layers": 2, "mtp_hybrid_override_pattern": "*M"}
SAME = {"mtp_use_repeated_layer": True}
SPARSE = {"mtp_num_layers": 2, "mtp_hybrid_override_pattern": "*E"}
LORA = {"lora_rank": 3, "lora_alpha": 5.0}
DELTA: dict[str, Case] = {
    "tensor and context parallel, ZeRO-3, tied": (
        8,
        "delta tied",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params") | context(2, "p2p"),
    ),
    "alone": (1, "delta", flags() | DROP),
    "documents of one token": (2, "delta", flags(tp=2) | ONES),
    "sequence parallel, whole layers recomputed": (4, "delta", flags(tp=4, sequence=True) | FULL),
    "exchanged heads": (2, "delta", flags() | context(2, "a2a")),
    "gathered keys, recomputed": (
        2,
        "delta",
        flags() | context(2, "all_gather") | selective("core_attn", "layernorm"),
    ),
    "hierarchical": (4, "delta", flags() | context(4, "a2a+p2p") | DROP),
    "ring, whole layers recomputed": (2, "delta", flags() | context(2, "p2p") | FULL),
    "deferred weights, uneven stages": (4, "delta", flags(tp=2, pp=2, sequence=True) | BUBBLES),
    "fewer microbatches than stages": (
        4,
        "delta tied",
        flags(pp=4) | {"micro_batch_size": 1, "global_batch_size": 2},
    ),
    "interleaved": (2, "delta", flags(pp=2, stages="E|t|t|tL")),
    "ZeRO-2 and deferred weights": (
        4,
        "delta",
        flags(pp=2, dp=2, strategy="optim_grads") | BUBBLES,
    ),
    "moved": (
        2,
        "delta",
        flags(tp=2, sequence=True) | MOVED | {"qk_layernorm_type": "all_heads"},
    ),
    "moved, ring": (2, "delta", flags() | MOVED | context(2, "p2p")),
    "experts on ranks": (
        4,
        "delta, experts",
        flags(tp=2, sequence=True, dp=2) | {"expert_model_parallel_size": 2},
    ),
    "adapters, sequence parallel": (2, "delta", flags(tp=2, sequence=True) | LORA),
    "adapters with magnitudes, exchanged heads": (
        2,
        "delta",
        flags() | context(2, "a2a") | LORA | {"use_dora": True, "lora_dropout": 0.1},
    ),
    "Muon, tensor parallel, ZeRO-1": (
        4,
        "delta",
        flags(tp=2, dp=2, strategy="optim") | {"optimizer": "muon"},
    ),
}
KIMI: dict[str, Case] = {
    "kimi, alone": (1, "kimi", flags() | DROP),
    "kimi, tensor and context parallel, ZeRO-3": (
        4,
        "kimi",
        flags(tp=2, sequence=True, strategy="optim_grads_params") | context(2, "p2p"),
    ),
    "kimi, tensor, context and data parallel, ZeRO-3": (
        8,
        "kimi",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params") | context(2, "p2p"),
    ),
    "kimi, documents of one token": (2, "kimi", flags(tp=2) | ONES),
    "kimi, sequence parallel, whole layers recomputed": (
        4,
        "kimi",
        flags(tp=4, sequence=True) | FULL,
    ),
    "kimi, gathered latents, recomputed": (
        2,
        "kimi",
        flags() | context(2, "all_gather") | selective("core_attn", "layernorm"),
    ),
    "kimi, exchanged heads, recomputed": (
        2,
        "kimi",
        flags() | context(2, "a2a") | selective("core_attn", "mlp"),
    ),
    "kimi, deferred weights, uneven stages": (
        4,
        "kimi",
        flags(tp=2, pp=2, sequence=True) | BUBBLES,
    ),
    "kimi, moved": (2, "kimi", flags(tp=2, sequence=True) | MOVED),
    "kimi, experts on ranks": (
        4,
        "kimi, experts",
        flags(tp=2, sequence=True, dp=2) | {"expert_model_parallel_size": 2},
    ),
    "kimi, further predictions, clipped logits, Muon, ZeRO-1": (
        4,
        "kimi",
        flags(tp=2, dp=2, strategy="optim")
        | {"optimizer": "muon", "mtp_num_layers": 2, "qk_clip": True, "qk_clip_threshold": 0.4},
    ),
}
HYBRID: dict[str, Case] = {
    "hybrid, tensor and context parallel, ZeRO-3, tied": (
        8,
        "hybrid tied",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params") | context(2, "p2p"),
    ),
    "hybrid, alone": (1, "hybrid", flags() | DROP),
    "hybrid, documents of one token": (2, "hybrid", flags(tp=2) | ONES),
    "hybrid, whole layers recomputed": (4, "hybrid", flags(tp=4, sequence=True) | FULL),
    "hybrid, exchanged heads, recomputed": (
        2,
        "hybrid",
        flags() | context(2, "a2a") | selective("core_attn", "layernorm", "mlp"),
    ),
    "hybrid, deferred weights, uneven stages": (
        4,
        "hybrid",
        flags(tp=2, pp=2, sequence=True) | BUBBLES,
    ),
    "hybrid, one layer or none a stage": (
        4,
        "hybrid tied",
        flags(pp=4, stages="E|t|||t|t||L") | {"micro_batch_size": 1},
    ),
    "hybrid, moved": (2, "hybrid", flags(tp=2, sequence=True) | MOVED),
    "hybrid, experts on ranks, ring, recomputed": (
        4,
        "hybrid, experts",
        flags(tp=2, sequence=True)
        | context(2, "p2p")
        | {"expert_model_parallel_size": 2}
        | selective("moe", "layernorm"),
    ),
    "hybrid, experts on replicated ranks, ring, recomputed": (
        8,
        "hybrid, experts",
        flags(tp=2, sequence=True, dp=2)
        | context(2, "p2p")
        | {"expert_model_parallel_size": 2}
        | selective("moe", "layernorm"),
    ),
    "hybrid, experts in a pipeline, ZeRO-2": (
        4,
        "hybrid, experts",
        flags(pp=2, dp=2, strategy="optim_grads") | {"expert_model_parallel_size": 2} | FULL,
    ),
    "hybrid, Muon, ZeRO-1": (
        4,
        "hybrid",
        flags(tp=2, dp=2, strategy="optim") | {"optimizer": "muon"},
    ),
}
PREDICTING: dict[str, Case] = {
    "further tokens, tensor and context parallel, ZeRO-3, tied": (
        8,
        "hybrid tied",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params")
        | context(2, "p2p")
        | FURTHER,
    ),
    "further tokens, alone": (1, "hybrid", flags() | DROP | FURTHER),
    "further tokens before the head, uneven stages, deferred weights": (
        4,
        "hybrid",
        flags(pp=4, stages="Et|t|tmm|L") | {"micro_batch_size": 1} | BUBBLES | FURTHER,
    ),
    "further tokens, whole layers recomputed": (
        4,
        "hybrid tied",
        flags(tp=2, pp=2, sequence=True, stages="Et|ttmmL") | FULL | FURTHER,
    ),
    "further tokens by experts on ranks, ring, recomputed": (
        8,
        "hybrid, experts",
        flags(tp=2, sequence=True, dp=2)
        | context(2, "p2p")
        | {"expert_model_parallel_size": 2}
        | selective("moe", "layernorm")
        | SPARSE,
    ),
    "further tokens by experts in a pipeline, ZeRO-3": (
        4,
        "hybrid, experts",
        flags(pp=2, dp=2, strategy="optim_grads_params", stages="Et|ttmmL")
        | {"expert_model_parallel_size": 2}
        | FULL
        | SPARSE,
    ),
    "further tokens by the same experts, ring, ZeRO-3, recomputed": (
        8,
        "hybrid, experts",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params")
        | context(2, "p2p")
        | {"expert_model_parallel_size": 2}
        | FULL
        | SPARSE
        | SAME,
    ),
    "further tokens by the same experts, ZeRO-1": (
        4,
        "hybrid, experts",
        flags(dp=4, strategy="optim") | {"expert_model_parallel_size": 2} | SPARSE | SAME,
    ),
    "further tokens with the same weights, deferred weights, ZeRO-2": (
        4,
        "hybrid tied",
        flags(pp=2, dp=2, strategy="optim_grads", stages="Et|ttmmL")
        | {"global_batch_size": 4}
        | BUBBLES
        | FURTHER
        | SAME,
    ),
    "further tokens with the same weights, tensor parallel, ZeRO-3": (
        4,
        "hybrid",
        flags(tp=2, dp=2, strategy="optim_grads_params") | FURTHER | SAME | DROP,
    ),
    "further tokens, moved, Muon": (
        2,
        "hybrid",
        flags(tp=2, sequence=True) | MOVED | FURTHER | {"optimizer": "muon"},
    ),
}
CONVOLVING: dict[str, Case] = {
    "convolutions, tensor and context parallel, ZeRO-3, tied": (
        8,
        "convolving tied",
        flags(tp=2, sequence=True, dp=2, strategy="optim_grads_params") | context(2, "p2p"),
    ),
    "convolutions, alone": (1, "convolving", flags() | DROP),
    "convolutions, documents of one token": (2, "convolving", flags(tp=2) | ONES),
    "convolutions, whole layers recomputed": (
        4,
        "convolving",
        flags(tp=4, sequence=True) | FULL,
    ),
    "convolutions, gathered keys, recomputed": (
        2,
        "convolving",
        flags() | context(2, "all_gather") | selective("core_attn", "layernorm"),
    ),
    "convolutions, hierarchical": (4, "convolving", flags() | context(4, "a2a+p2p") | DROP),
    "convolutions, deferred weights, uneven stages": (
        4,
        "convolving",
        flags(tp=2, pp=2, sequence=True) | BUBBLES,
    ),
    "convolutions, interleaved, ZeRO-2": (
        4,
        "convolving",
        flags(pp=2, dp=2, strategy="optim_grads", stages="E|t|t|tL"),
    ),
    "convolutions, moved, ring": (2, "convolving", flags() | MOVED | context(2, "p2p")),
    "convolutions, adapters, sequence parallel": (
        2,
        "convolving",
        flags(tp=2, sequence=True) | LORA,
    ),
    "convolutions, Muon, tensor parallel, ZeRO-1": (
        4,
        "convolving",
        flags(tp=2, dp=2, strategy="optim") | {"optimizer": "muon"},
    ),
}
CASES = DELTA | KIMI | HYBRID | PREDICTING | CONVOLVING
WHOLE_ROWS = [case for case in CASES if "documents" not in case and "experts" not in case]
WHOLE_ROWS += [case for case in PREDICTING if "experts" in case]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "fewer microbatches than stages",
        "adapters with magnitudes, exchanged heads",
        "kimi, tensor and context parallel, ZeRO-3",
        "hybrid, experts on ranks, ring, recomputed",
        "further tokens with the same weights, deferred weights, ZeRO-2",
        "convolutions, moved, ring",
    ),
)
def test_layouts(case: str) -> None:
    computes_what_one_device_does(CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        WHOLE_ROWS,
        "ring, whole layers recomputed",
        "moved",
        "further tokens by the same experts, ZeRO-1",
    ),
)
def test_bytes_and_products_are_those_of_theory(case: str, tmp_path: Path) -> None:
    does_what_theory_says(CASES[case], tmp_path)
