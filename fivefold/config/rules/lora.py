"""Checks adapters (LoRA) against the rest of a configuration."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from fivefold.config.config import Config
from fivefold.config.lora import LoraTarget
from fivefold.config.model import ModelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes


def check_adapters(model: ModelConfig, mistakes: Mistakes) -> None:
    """Report what is wrong with the adapters of a model on their own, if it has any."""
    rank = model.lora_rank
    if rank is None:
        return
    if rank < 1:
        mistakes.add(f"lora_rank must be positive, not {rank}", works=("--lora-rank 16",))
    chosen = model.lora_target_modules
    if not chosen:
        mistakes.add(
            "lora_target_modules is empty: nothing would be trained",
            works=("--lora-target-modules all-linear",),
        )
    for name in chosen:
        if name not in get_args(LoraTarget):
            mistakes.add(f"unknown lora_target_modules {name!r}", works=get_args(LoraTarget))
    there = linear_names(model)
    if missing := [n for n in chosen if n in get_args(LoraTarget)[1:] and n not in there]:
        mistakes.add(
            f"the model has no linear layers {' '.join(missing)}, which lora_target_modules names",
            works=(f"--lora-target-modules {' '.join(there)}",),
        )


_OF_VARIANT: Mapping[str, tuple[LoraTarget, ...]] = MappingProxyType(
    {
        "gated_delta_net": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
        "short_convolution": ("in_proj_xc", "in_proj_b", "out_proj"),
    }
)
"""Linear layers of layers that keep a state, by `experimental_attention_variant`."""


def linear_names(model: ModelConfig) -> tuple[str, ...]:
    """Names of the linear layers of a model that may have adapters.

    Routers have no adapters, nor have a mixture's experts, which are one parameter.
    """
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if model.multi_latent_attention:
        queries = ["q_proj"] if model.q_lora_rank is None else ["q_a_proj", "q_b_proj"]
        names = [*queries, "kv_a_proj", "kv_b_proj", "o_proj"]
    names += _OF_VARIANT.get(model.experimental_attention_variant or "", ())
    if model.has_dense_layers or model.shared_ffn_size:
        names += ["gate_proj"] if model.gated_linear_unit else []
        names += ["up_proj", "down_proj"]
    return tuple(names)


def check_adapted_run(config: Config, mistakes: Mistakes) -> None:
    """Report settings that cannot be combined with training adapters only."""
    if config.model.lora_rank is None:
        return
    parallel, training = config.parallel, config.training
    if training.fp8_format is not None:
        mistakes.add(
            "lora_rank: layers with adapters multiply in the type of the run, not in fp8",
            works=("--fp8-format none",),
        )
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if getattr(parallel, name):
            flag = flag_of(f"no_{name}")
            mistakes.add(f"lora_rank: {name} does not support frozen weights", works=(flag,))
    for name in ("optimizer_cpu_offload", "offload_optimizer_states"):
        if getattr(config.memory, name):
            mistakes.add(
                f"lora_rank: frozen weights have no optimizer state that {name} could move, and "
                "adapters have little",
                works=(flag_of(f"no_{name}"),),
            )
    gathers = "all_gather" in parallel.cp_comm_type and parallel.context_parallel_size > 1
    if gathers and config.model.multi_latent_attention:
        mistakes.add(
            "lora_rank: cp_comm_type all_gather makes keys and values from latents of other ranks, "
            "without adapters",
            works=("--context-parallel-size 1",)
            if config.model.is_sparse
            else ("--cp-comm-type p2p", "--cp-comm-type a2a"),
        )
