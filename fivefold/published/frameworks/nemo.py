"""NeMo and Megatron-Bridge, by release of their containers."""

from dataclasses import replace

from fivefold.published.frameworks.framework import Framework
from fivefold.published.frameworks.megatron import CORE

NEMO: tuple[Framework, ...] = (
    # FlashAttention-2 where a recipe does not choose cuDNN's, and scales of earlier steps
    # (`bf16_with_fp8_mixed`), as later.
    Framework(
        "nemo",
        r"\bnemo\b(?!-?automodel)",
        software=replace(CORE, attention="flash2"),
        overlaps_tp=True,
        fp8_recipe="delayed",
        whole_attention=True,
    ),
    Framework(
        "nemo", "", (2025,), CORE, overlaps_tp=True, fp8_recipe="delayed", whole_attention=True
    ),
)
BRIDGE: tuple[Framework, ...] = (
    Framework("bridge", r"megatron-?bridge", software=CORE, overlaps_tp=True),
    # Its recipes since June 2026 (perf_recipes, `cuda_graph_impl = "full_iteration"`).
    Framework("bridge", "", (2026, 6), replace(CORE, whole_graph=True), overlaps_tp=True),
)
