"""What selective recomputation runs again, by the modules that a layer's time is made of."""

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.config.memory import MemoryConfig

RERUN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("core_attn",),
        "mlp": ("fc1", "mlp_act"),
        "moe": (
            "router",
            "dispatch",
            "expert_fc1",
            "moe_act",
            "expert_fc2",
            "shared_fc1",
            "shared_act",
        ),
        "moe_act": ("moe_act",),
        "shared_experts": ("shared_fc1", "shared_act"),
        "routed_experts": ("expert_fc1", "moe_act"),
        "layernorm": ("attn_norm", "mlp_norm"),
        "mla_up_proj": ("mla_up",),
    }
)
"""Module of recompute_modules -> what runs again in the backward."""


def rerun_modules(memory: MemoryConfig) -> tuple[str, ...]:
    """Modules that selective recomputation runs again."""
    selective = memory.recompute_granularity == "selective"
    chosen = memory.recompute_modules if selective else ()
    return tuple(dict.fromkeys(name for module in chosen for name in RERUN[module]))
