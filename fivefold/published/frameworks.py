"""The frameworks of published runs, found by the name of a row's source."""

import re
from types import MappingProxyType

from fivefold.published.framework import Framework
from fivefold.published.nanotron import NANOTRON
from fivefold.published.torchtitan import TORCHTITAN

MEGATRON = Framework("")

FOUNDRY = Framework(
    "foundry",
    attention="flash1",
    fused=False,
    fused_loss=True,  # FlashAttention's, by default
    fp8_recipe="delayed",
    whole_attention=True,
)

DEEPSEEK = Framework(
    "deepseek",
    fp8_recipe="blockwise",  # as its report describes, and so
    expert_settings=MappingProxyType(  # DualPipe, which hides the all-to-alls
        {"overlap_moe_expert_parallel_comm": True, "pipeline_schedule": "dualpipe"}
    ),
)

# Since 2025, and before; tensorwise scales came to TransformerEngine in between.
NEMO = Framework(r"nemo.*\b2[5-9]\.", overlaps_tp=True, whole_attention=True)
EARLY_NEMO = Framework(
    "nemo", attention="flash2", overlaps_tp=True, fp8_recipe="delayed", whole_attention=True
)

# Its recipes since June 2026 (perf_recipes, `cuda_graph_impl = "full_iteration"`), and before.
GRAPHED_BRIDGE = Framework(
    r"megatron-bridge.*\b(26\.(0[6-9]|1[0-2])|2[7-9]\.)", overlaps_tp=True, whole_graph=True
)
BRIDGE = Framework("megatron-bridge|readme h100", overlaps_tp=True)

# Megatron's regression tests ask for kernels that are deterministic, as cuDNN's are not, and for
# no fused accumulation of gradients.
REGRESSION_TESTS = Framework(" ci ", attention="flash2", accumulates_apart=True)

FRAMEWORKS = (
    NANOTRON,
    TORCHTITAN,
    FOUNDRY,
    DEEPSEEK,
    NEMO,
    EARLY_NEMO,
    GRAPHED_BRIDGE,
    BRIDGE,
    REGRESSION_TESTS,
    MEGATRON,
)
"""The first framework whose mark matches is used; the mark of Megatron-LM matches every source."""


def framework_of(source: str) -> Framework:
    """The framework of a source; Megatron-LM if its name tells none."""
    return next(each for each in FRAMEWORKS if re.search(each.mark, source.lower()))
