"""Checks settings of memory techniques, alone and against the model."""

from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.errors import Mistakes
from fivefold.units import read_bytes

_WHOLE = {
    "a2a_overlap_attn": {"core_attn", "mla_up_proj"},
    "a2a_overlap_post_attn": {"moe"},
    "a2a_overlap_mlp": {"moe"},
}
"""Recomputed module -> modules with which parts of it would be recomputed twice."""
_EXPERT_MODULES = (
    "moe",
    "moe_act",
    "shared_experts",
    "routed_experts",
    "expert_fc1",
    "dispatched_input",
    "a2a_overlap_attn",
    "a2a_overlap_post_attn",
    "a2a_overlap_mlp",
)


def check_memory(memory: MemoryConfig, model: ModelConfig, mistakes: Mistakes) -> None:
    """Collect mistakes: modules that the model does not have, contradictory settings."""
    _check_named(memory, model, mistakes)
    _check_numbers(memory, mistakes)
    _check_limit(memory, mistakes)
    limit = memory.device_memory_limit
    if limit is not None and read_bytes(limit) is None:
        mistakes.add(
            f"device_memory_limit = {limit!r} is no size",
            works=["--device-memory-limit 70GiB", "--device-memory-limit none"],
        )
    moves = memory.fine_grained_activation_offloading
    moved = memory.offload_modules if moves else ()
    tensors = memory.offload_tensors if moves else ()
    _check_moved(memory, moved, tensors, mistakes)
    _check_twice(memory, moved, mistakes)
    if "dispatched_input" in tensors:
        chosen = memory.recompute_granularity == "selective"
        _check_dispatched(moved, memory.recompute_modules if chosen else (), mistakes)


def _check_named(memory: MemoryConfig, model: ModelConfig, mistakes: Mistakes) -> None:
    """Add modules and tensors that the model does not have, or that nothing would move."""
    named: dict[str, tuple[str, ...]] = {}
    if memory.recompute_granularity == "selective":
        named["recompute_modules"] = memory.recompute_modules
    if memory.fine_grained_activation_offloading:
        named["offload_modules"] = memory.offload_modules
        named["offload_tensors"] = memory.offload_tensors
        if not memory.moved_items:
            mistakes.add(
                "fine_grained_activation_offloading needs offload_modules, what to move",
                works=["--offload-modules core_attn attn_proj"],
            )
    for name, modules in named.items():
        for module in modules:
            if module in _EXPERT_MODULES and model.num_experts is None:
                mistakes.add(f"{name}: {module} needs a model with num_experts")
            if module == "shared_experts" and model.num_experts and not model.shared_ffn_size:
                mistakes.add(f"{name}: {module} needs moe_shared_expert_intermediate_size")
            if module == "mla_up_proj" and not model.multi_latent_attention:
                mistakes.add(f"{name}: {module} needs a model with multi_latent_attention")


def _check_numbers(memory: MemoryConfig, mistakes: Mistakes) -> None:
    """Add impossible numbers of layers, and numbers per stage where none are expected."""
    numbers, some = memory.recompute_num_layers, memory.recomputes_first_layers
    shown = " ".join(map(str, numbers))
    if not numbers or min(numbers) < 0:
        mistakes.add(
            f"recompute_num_layers must be 0 or more, not {shown or 'none'}",
            works=[f"--recompute-num-layers {max(1, 1, *numbers)}"],
        )
    elif not any(numbers):
        mistakes.add(
            f"recompute_num_layers must be at least 1 of some stage, not {shown}",
            works=["--recompute-num-layers 1"],
        )
    elif len(numbers) > 1 and memory.recompute_granularity == "full" and not some:
        mistakes.add(
            f"recompute_num_layers {shown} gives one number per stage, and recompute_method "
            "uniform takes a single one: it recomputes all layers in groups of that size; block "
            "recomputes that many of the first layers of each stage",
            works=["--recompute-method block", "--recompute-num-layers 1"],
        )


def _check_limit(memory: MemoryConfig, mistakes: Mistakes) -> None:
    """Add what is wrong with the limit of microbatches in flight."""
    limit = memory.recompute_in_flight_limit
    if limit is not None and limit < 1:
        mistakes.add(
            f"recompute_in_flight_limit must be at least 1, not {limit}: a backward needs the "
            "activations of its microbatch",
            works=["--recompute-in-flight-limit 1"],
        )
    if memory.recompute_granularity == "full" and limit is not None:
        mistakes.add(
            f"recompute_in_flight_limit = {limit} runs whole stages again, and "
            "recompute_granularity = full the layers of all microbatches: one of the two is enough",
            works=["--recompute-in-flight-limit none", "--recompute-granularity none"],
        )


def _check_moved(
    memory: MemoryConfig,
    moved: tuple[str, ...],
    tensors: tuple[str, ...],
    mistakes: Mistakes,
) -> None:
    """Add tensors that would be offloaded although they are not saved, or are still in use."""
    full = memory.recompute_granularity == "full"
    lost = (*moved, *(tensor for tensor in tensors if tensor != "layer_input"))
    if full and lost:
        mistakes.add(
            "full recomputation keeps only the inputs of layers, of which "
            f"{' '.join(lost)} could move nothing",
            works=["--recompute-granularity selective", "--no-fine-grained-activation-offloading"],
        )
    if "layer_input" in tensors and not full:
        mistakes.add(
            "offload_tensors: layer_input is kept by full recomputation only",
            works=["--recompute-granularity full", "--offload-tensors none"],
        )
    if "pre_mlp_layernorm_output" in tensors and "layernorm" in memory.recomputed_modules:
        mistakes.add(
            "offload_tensors: pre_mlp_layernorm_output is recomputed by recompute_modules "
            "layernorm, and so not kept",
            works=["--offload-tensors none"],
        )
    if "attn_proj" in moved and "core_attn" not in moved:
        mistakes.add(
            "offload_modules: attn_proj needs core_attn, whose output is its input and is used in "
            "the backward of both",
            works=["--offload-modules core_attn attn_proj"],
        )


def _check_twice(memory: MemoryConfig, moved: tuple[str, ...], mistakes: Mistakes) -> None:
    """Add what would be both recomputed and offloaded, or recomputed twice."""
    again = {*memory.recomputed_modules}
    held = {"mlp_norm"} if "a2a_overlap_post_attn" in again else set[str]()
    if "a2a_overlap_attn" in again:
        held |= {"attn_norm", "qkv_linear", "core_attn", "attn_proj"}
    if not again.isdisjoint({"moe", "routed_experts"}):
        held |= {"expert_fc1", "moe_act"}
    twice = sorted({*moved} & (again - {"core_attn", "moe_act"} | held))
    if twice:
        mistakes.add(f"{' '.join(twice)} cannot be both recomputed and offloaded")
    for module, parts in _WHOLE.items():
        if module in again and again & parts:
            both = " ".join(sorted(again & parts))
            others = " ".join(m for m in memory.recompute_modules if m not in parts)
            mistakes.add(
                f"recompute_modules {module} and {both} would recompute the same twice",
                works=[f"--recompute-modules {others}"],
            )


def _check_dispatched(moved: tuple[str, ...], again: tuple[str, ...], mistakes: Mistakes) -> None:
    """Add settings that leave no dispatched tokens to offload."""
    off = "--offload-tensors none"
    if "expert_fc1" in moved:
        mistakes.add(
            "offload_modules expert_fc1 moves the tokens that reach experts, and so does "
            "offload_tensors dispatched_input: one of the two is enough",
            works=[off],
        )
    if "moe" in again:
        mistakes.add(
            "recompute_modules moe dispatches tokens again, so that offload_tensors "
            "dispatched_input finds none that are kept",
            works=[off, "--recompute-modules routed_experts"],
        )
