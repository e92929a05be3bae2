"""Megatron-LM's flags for memory techniques, and the techniques that it lacks."""

from collections.abc import Iterable, Iterator
from math import ceil

from fivefold.config.memory import MemoryConfig
from fivefold.config.training import ELEMENT_BYTES
from fivefold.layout import Layout
from fivefold.tell.export.settings import Settings, flag, flags, set_flag

_MODULES = {
    "routed_experts": "moe",
    "a2a_overlap_attn": "core_attn",
    "a2a_overlap_post_attn": "layernorm",
    "a2a_overlap_mlp": "moe",
}
"""Modules that it does not recompute alone, and those that are nearest."""
_OF_MIXERS = ("qkv_linear", "core_attn", "attn_proj")
"""Offloaded modules that only its softmax attention has."""
_WITHOUT_DELAY = ("moe_act", "layernorm")
"""Modules that it recomputes in 8 bits only where no scale is of an earlier step."""


def memory_flags(said: Settings, runs: Layout) -> Iterator[str]:
    """Flags of recomputation, offloading, the fused loss and the optimizer in host memory."""
    granularity = said["recompute_granularity"]
    yield from set_flag("recompute_granularity", granularity)
    if granularity == "full":
        said.mention("recompute_num_layers")
        yield from flags(said, "recompute_method")
        # It has one number for all stages: the largest keeps no more than any of them.
        yield from flag("recompute-num-layers", max(runs.config.memory.recompute_num_layers))
    elif granularity == "selective":
        said.mention("recompute_method", "recompute_num_layers")
        yield from set_flag("recompute_modules", _its_modules(said["recompute_modules"]))
    # It moves dispatched tokens as what the experts' first linear layers save.
    dispatched = ("expert_fc1" for name in said["offload_tensors"] if name == "dispatched_input")
    moved = (*said["offload_modules"], *dispatched)
    if said["fine_grained_activation_offloading"] and moved:
        yield from flags(said, "fine_grained_activation_offloading")
        yield from set_flag("offload_modules", moved)
        width = ELEMENT_BYTES[said["precision"]]  # its code counts elements
        yield from flag(
            "min-offloaded-tensor-size", ceil(said["min_offloaded_tensor_size"] / width)
        )
    if said["cross_entropy_loss_fusion"] and not said["deterministic_mode"]:
        yield "--cross-entropy-loss-fusion"
        impl = said["cross_entropy_fusion_impl"]
        yield from flag("cross-entropy-fusion-impl", "native" if impl == "linear" else impl)
    if said["optimizer_cpu_offload"]:
        yield from flags(said, "optimizer_cpu_offload", "optimizer_offload_fraction")
    sharded = said["data_parallel_sharding_strategy"] != "no_shard"
    aware = sharded and said["use_precision_aware_optimizer"]
    if aware or said["optimizer_cpu_offload"]:
        yield from flag("use-precision-aware-optimizer")
    if aware:
        yield from flags(said, "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _its_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """Megatron-LM's modules for these recomputed modules."""
    return tuple(dict.fromkeys(_MODULES.get(module, module) for module in modules))


def one_number(memory: MemoryConfig) -> bool:
    """Whether Megatron-LM recomputes the same layers: whole layers, the same number in every
    stage."""
    if not memory.recomputes_first_layers:
        return True
    return memory.recompute_granularity == "full" and len(memory.recompute_num_layers) == 1


def lost_of_memory(memory: MemoryConfig, runs: Layout) -> Iterator[str]:
    """Sentences on memory settings that Megatron-LM lacks in the layout that it runs."""
    if memory.fine_grained_activation_offloading:
        others = [name for name in memory.offload_tensors if name != "dispatched_input"]
        if others:
            yield f"it does not move {' '.join(others)} (offload_tensors)"
        if "dispatched_input" in memory.offload_tensors:
            yield "it moves dispatched tokens (offload_tensors) as expert_fc1 of offload_modules"
        model = runs.config.model
        of_mixers = [name for name in memory.offload_modules if name in _OF_MIXERS]
        if of_mixers and any(map(model.is_linear, range(model.num_layers))):
            yield f"its offload_modules {' '.join(of_mixers)} move nothing of layers with a state"
        yield (
            "fine_grained_activation_offloading wants NVTE_CPU_OFFLOAD_V1=1 in the environment "
            "with Transformer Engine 2.10 and later"
        )
    asked = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    for module in (module for module in asked if module in _MODULES):
        yield f"recompute_modules {module} became {_MODULES[module]}: it has nothing nearer"
    training = runs.config.training
    late = training.delays_scales and training.fp4_format is None
    if late and (lost := [name for name in _its_modules(asked) if name in _WITHOUT_DELAY]):
        yield f"it refuses recompute_modules {' '.join(lost)} with fp8_recipe delayed"
    if memory.recomputes_logits:
        yield (
            "cross_entropy_fusion_impl linear needs a release after 0.16: native fuses the loss "
            "alone, and keeps the logits"
        )
    if memory.offload_optimizer_states:
        yield "offload_optimizer_states was left out: it needs a release after 0.16"
    numbers = " ".join(map(str, memory.recompute_num_layers))
    if memory.recomputed_modules and memory.recomputes_first_layers:
        yield (
            f"it recomputes modules in every layer, not in the first {numbers} of a stage "
            "(recompute_method = block)"
        )
    elif memory.recomputes_first_layers and " " in numbers:
        most = max(runs.config.memory.recompute_num_layers)
        yield f"it recomputes {most} layers of every stage: recompute_num_layers = {numbers}"
