"""What is not kept on the device between forward and backward."""

from dataclasses import dataclass
from typing import Literal

from fivefold.config.parallel import option

RecomputeModule = Literal[
    "core_attn",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "routed_experts",
    "layernorm",
    "mla_up_proj",
]
OffloadModule = Literal["attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


@dataclass(frozen=True)
class MemoryConfig:
    """Recomputation, offloading and fused losses, under Megatron-LM's names."""

    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "recompute whole layers, or the modules that recompute_modules names"
    )
    recompute_method: Literal["uniform", "block"] = option(
        "uniform", "full recomputation of every layer in groups, or of the first layers of a stage"
    )
    recompute_num_layers: int = option(
        1, "layers in a group (uniform), or layers of a stage that are recomputed (block)"
    )
    recompute_modules: tuple[RecomputeModule, ...] = option(
        ("core_attn",), "what selective recomputation makes anew"
    )
    fine_grained_activation_offloading: bool = option(
        False, "move the inputs of offload_modules to host memory until their backward"
    )
    offload_modules: tuple[OffloadModule, ...] = option((), "modules whose inputs are moved")
    cross_entropy_loss_fusion: bool = option(False, "compute the loss without keeping its parts")
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = option(
        "native",
        "fuse the loss alone, or with the output layer (linear), so that no logits are kept",
    )
    optimizer_cpu_offload: bool = option(False, "keep and step optimizer state in host memory")
    optimizer_offload_fraction: float = option(1.0, "share of the optimizer state that is moved")
