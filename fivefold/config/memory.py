"""Settings that save device memory: recomputation, offloading and fused losses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fivefold.config.model import ModelConfig
from fivefold.config.parallel import option
from fivefold.errors import Mistakes
from fivefold.units import read_bytes

RecomputeModule = Literal[
    "core_attn",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "routed_experts",
    "layernorm",
    "mla_up_proj",
    "a2a_overlap_attn",
    "a2a_overlap_post_attn",
    "a2a_overlap_mlp",
]
OffloadModule = Literal["attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
OffloadTensor = Literal["dispatched_input", "pre_mlp_layernorm_output", "layer_input"]


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
        1, "layers per recomputed group (uniform), or recomputed layers per stage (block)"
    )
    recompute_modules: tuple[RecomputeModule, ...] = option(
        ("core_attn",), "modules that selective recomputation runs again in the backward"
    )
    tiled_mlp_num_shards: int = option(
        1,
        "tiles of the tokens in which recomputed dense MLPs run, forward and backward, so that the "
        "inner features of one tile exist at a time",
    )
    recompute_in_flight_limit: int | None = option(
        None,
        "most microbatches of each stage whose activations a pipeline rank holds; for the others "
        "it keeps the stage's input, and recomputes the stage before their backward",
    )
    fine_grained_activation_offloading: bool = option(
        False,
        "move the inputs of offload_modules, and offload_tensors, to host memory until their "
        "backward",
    )
    offload_modules: tuple[OffloadModule, ...] = option((), "modules whose inputs are offloaded")
    offload_tensors: tuple[OffloadTensor, ...] = option(
        (),
        "tensors that are offloaded; dispatched_input: the tokens that reach experts; layer_input: "
        "what full recomputation keeps",
    )
    min_offloaded_tensor_size: int = option(1 << 20, "bytes of the smallest tensor to offload")
    activation_offload_fraction: float = option(
        1.0, "share of the bytes of each offloaded tensor that goes; the rest stays on the device"
    )
    cross_entropy_loss_fusion: bool = option(
        False, "compute the loss without keeping intermediate results"
    )
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = option(
        "native",
        "fuse the loss alone, or with the output layer (linear), which then keeps no logits",
    )
    device_memory_limit: str | None = option(
        None,
        "most bytes, such as 3GiB, that tensors of a step may take on each device; a run that "
        "would need more stops and says what holds them",
    )
    optimizer_cpu_offload: bool = option(False, "keep and step optimizer state in host memory")
    offload_optimizer_states: bool = option(
        False,
        "keep optimizer state in host memory, and bring it to the device bucket by bucket for each "
        "update there",
    )
    optimizer_offload_fraction: float = option(1.0, "share of the optimizer state in host memory")
    optimizer_offload_path: str | None = option(
        None, "folder of the disk on which offloaded masters and moments lie, in place of memory"
    )
    param_cpu_offload: bool = option(
        False,
        "keep weights in host memory, and on the device only those of layers that are gathered "
        "(optim_grads_params, with optimizer_cpu_offload or offload_optimizer_states)",
    )
    param_offload_path: str | None = option(
        None, "folder of the disk on which offloaded weights lie, in place of host memory"
    )

    @property
    def optimizer_off_device(self) -> bool:
        """Whether optimizer state is off the device between updates, wherever it is updated."""
        return self.optimizer_cpu_offload or self.offload_optimizer_states

    @property
    def makes_logits_again(self) -> bool:
        """Whether the loss keeps no logits, so that its backward computes them once more."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def remade_modules(self) -> tuple[str, ...]:
        """Modules that selective recomputation runs again; a2a_overlap_mlp stands for several."""
        if self.recompute_granularity != "selective":
            return ()
        modules: tuple[str, ...] = self.recompute_modules
        if "a2a_overlap_mlp" in modules:
            modules += ("mlp", "routed_experts", "shared_experts")
        return tuple(dict.fromkeys(modules))

    @property
    def remakes_mlp(self) -> bool:
        """Whether some dense MLP is recomputed."""
        return self.recompute_granularity == "full" or "mlp" in self.remade_modules

    def tile_of(self, tokens: int) -> int:
        """Tokens in each tile of a recomputed dense MLP, of which the last may be smaller."""
        return -(-tokens // self.tiled_mlp_num_shards)

    def last_tile(self, tokens: int) -> float:
        """Share of the tokens in the last tile."""
        size = self.tile_of(tokens)
        return (tokens - size * ((tokens - 1) // size)) / tokens

    @property
    def modules_of_halves(self) -> tuple[str, ...]:
        """Modules among them that exist only where a forward and a backward are interleaved."""
        return tuple(name for name in self.remade_modules if name.startswith("a2a_overlap"))

    @property
    def moved_items(self) -> tuple[str, ...]:
        """What is offloaded, by the module that keeps it."""
        if not self.fine_grained_activation_offloading:
            return ()
        kept = (item for tensor in self.offload_tensors for item in _KEPT_BY[tensor])
        return (*self.offload_modules, *kept)

    def recomputed_groups(self, num_layers: int) -> list[tuple[range, bool]]:
        """The groups of consecutive layers of a stage, and whether each is recomputed."""
        everything = range(num_layers)
        if self.recompute_granularity != "full":
            return [(everything, False)]
        size = self.recompute_num_layers
        if self.recompute_method == "uniform":
            return [(everything[start : start + size], True) for start in everything[::size]]
        return [(range(i, i + 1), True) for i in everything[:size]] + [(everything[size:], False)]


WEIGHT_ROOMS = 2
"""Rooms in host memory into which weights are read from a disk ahead of their use."""
UPDATE_BUCKET = 4 << 20
"""Elements of optimizer state off the device that are updated at once, wherever that is."""
UPDATE_ROOMS = 3
"""Rooms through which buckets pass: one is read, one is updated, one is written back."""


def update_rooms(elements: int) -> tuple[int, int]:
    """Number of rooms through which buckets of so many elements pass, and elements of each."""
    return (UPDATE_ROOMS, UPDATE_BUCKET) if elements > UPDATE_BUCKET else (1, elements)


DEFAULT_VOCAB_SPLIT = 3072
LOSS_TOKENS = 1 << 14
"""Tokens whose logits of a slice of the vocabulary the linear fusion holds at a time."""
VOCAB_SPLIT_VARIABLES = (
    "LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE",
    "LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE",
)


def vocab_split_sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Vocabulary entries whose logits the linear fusion holds at a time, forward and backward.

    Args:
        environment: environment variables; Megatron-LM's are positive numbers if they are set.

    Raises:
        ConfigError: one of them is set to something else, or another of their kind is set.
    """
    mistakes = Mistakes()
    for name in sorted(environment):
        if name.startswith("LCE_GENERIC_") and name not in VOCAB_SPLIT_VARIABLES:
            known = " and ".join(VOCAB_SPLIT_VARIABLES)
            mistakes.add(f"{name} is not known: {known} split the vocabulary of a linear loss")
    sizes = []
    for name in VOCAB_SPLIT_VARIABLES:
        text = environment.get(name, str(DEFAULT_VOCAB_SPLIT))
        if not (text.isdecimal() and int(text) > 0):
            mistakes.add(f"{name} must be a positive number, not {text!r}")
            continue
        sizes.append(int(text))
    mistakes.raise_if_any()
    return sizes[0], sizes[1]


_KEPT_BY: Mapping[OffloadTensor, tuple[str, ...]] = {
    "dispatched_input": ("expert_fc1",),
    "pre_mlp_layernorm_output": ("fc1", "moe_input"),
    "layer_input": ("layer_input",),
}
"""Offloaded tensor -> what keeps it for the backward, in the breakdown of activations."""
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
    """Add modules and tensors that the model does not have, or that nothing moves."""
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
    for name in ("offload_modules", "offload_tensors"):
        if not memory.fine_grained_activation_offloading and getattr(memory, name):
            mistakes.add(
                f"{name} {' '.join(getattr(memory, name))} are moved by "
                "fine_grained_activation_offloading only",
                works=[
                    "--fine-grained-activation-offloading",
                    f"--{name.replace('_', '-')} none",
                ],
            )
    for name, modules in named.items():
        for module in modules:
            if module in _EXPERT_MODULES and model.num_experts is None:
                mistakes.add(f"{name}: {module} needs a model with num_experts")
            if module == "shared_experts" and model.num_experts and not model.shared_ffn_size:
                mistakes.add(f"{name}: {module} needs moe_shared_expert_intermediate_size")
            if module == "mla_up_proj" and not model.multi_latent_attention:
                mistakes.add(f"{name}: {module} needs a model with multi_latent_attention")


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
    """Add what would be offloaded and is not kept, or is still in use."""
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
    if "pre_mlp_layernorm_output" in tensors and "layernorm" in memory.remade_modules:
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
    again = {*memory.remade_modules}
    held = {"attn_norm", "core_attn", "attn_proj"} if "a2a_overlap_attn" in again else set[str]()
    held |= {"mlp_norm"} if "a2a_overlap_post_attn" in again else set()
    twice = sorted({*moved} & (again - {"core_attn"} | held))
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
    """Add what leaves nothing of dispatched tokens to be offloaded."""
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
