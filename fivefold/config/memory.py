"""Settings that save device memory: recomputation, offloading and fused losses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fivefold.config.settings import Count, PositiveShare, option
from fivefold.errors import Mistakes

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
OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
OffloadTensor = Literal["dispatched_input", "pre_mlp_layernorm_output", "layer_input"]


@dataclass(frozen=True)
class MemoryConfig:
    """Recomputation, offloading and fused losses, under Megatron-LM's names."""

    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "recompute whole layers, or the modules that recompute_modules names"
    )
    recompute_method: Literal["uniform", "block"] = option(
        "uniform",
        "recompute all layers (with full: in groups), or the first layers of each stage (block)",
    )
    recompute_num_layers: tuple[int, ...] = option(
        (1,),
        "layers per recomputed group (uniform), or recomputed layers per stage (block): one number "
        "for all stages, or one for each",
    )
    recompute_modules: tuple[RecomputeModule, ...] = option(
        ("core_attn",), "modules that selective recomputation runs again in the backward"
    )
    tiled_mlp_num_shards: Count = option(
        1,
        "run recomputed dense MLPs in this many tiles of tokens, so that the inner features of "
        "only one tile exist at a time",
    )
    recompute_in_flight_limit: int | None = option(
        None,
        "most microbatches of each stage whose activations a pipeline rank holds; of the "
        "others it keeps the stage's input, and recomputes the stage before their backward",
    )
    fine_grained_activation_offloading: bool = option(
        False,
        "move the inputs of offload_modules, and offload_tensors, to host memory until their "
        "backward",
    )
    offload_modules: tuple[OffloadModule, ...] = option((), "modules whose inputs are offloaded")
    offload_tensors: tuple[OffloadTensor, ...] = option(
        (),
        "tensors to offload; dispatched_input: the tokens that reach experts; "
        "pre_mlp_layernorm_output: the input of MLPs and experts; layer_input: with full "
        "recomputation",
    )
    min_offloaded_tensor_size: Count = option(1 << 20, "bytes of the smallest tensor to offload")
    activation_offload_fraction: PositiveShare = option(
        1.0, "share of the bytes of each offloaded tensor that is moved to the host"
    )
    cross_entropy_loss_fusion: bool = option(
        False, "compute the loss without keeping intermediate results"
    )
    cross_entropy_fusion_impl: Literal["native", "te", "linear"] = option(
        "native",
        "fuse the loss alone (native, te), or with the output layer, storing no logits (linear)",
    )
    device_memory_limit: str | None = option(
        None,
        "most bytes, such as 3GiB, of tensors on each device in a step; a run that needs more "
        "stops and names the largest",
    )
    optimizer_cpu_offload: bool = option(False, "keep and step optimizer state in host memory")
    offload_optimizer_states: bool = option(
        False,
        "keep optimizer state in host memory, and copy it to the device bucket by bucket to "
        "update it there",
    )
    optimizer_offload_fraction: PositiveShare = option(
        1.0, "share of the optimizer state in host memory"
    )
    optimizer_offload_path: str | None = option(
        None, "folder on a disk (NVMe) for offloaded masters and moments (default: host memory)"
    )
    param_cpu_offload: bool = option(
        False,
        "keep weights in host memory; the device holds only gathered layers "
        "(optim_grads_params, with optimizer_cpu_offload or offload_optimizer_states)",
    )
    param_offload_path: str | None = option(
        None, "folder on a disk (NVMe) for offloaded weights (default: host memory)"
    )

    @property
    def optimizer_off_device(self) -> bool:
        """Whether optimizer state is off the device between updates, wherever it is updated."""
        return self.optimizer_cpu_offload or self.offload_optimizer_states

    @property
    def recomputes_logits(self) -> bool:
        """Whether the loss saves no logits, so that its backward recomputes them."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Modules that selective recomputation recomputes somewhere; a2a_overlap_mlp stands for
        several."""
        if self.recompute_granularity != "selective":
            return ()
        modules: tuple[str, ...] = self.recompute_modules
        if "a2a_overlap_mlp" in modules:
            modules += ("mlp", "routed_experts", "shared_experts")
        return tuple(dict.fromkeys(modules))

    @property
    def recomputes_mlp(self) -> bool:
        """Whether some dense MLP is recomputed."""
        return self.recompute_granularity == "full" or "mlp" in self.recomputed_modules

    def tile_of(self, tokens: int) -> int:
        """Tokens in each tile of a recomputed dense MLP; the last tile may be smaller."""
        return -(-tokens // self.tiled_mlp_num_shards)

    def num_tiles(self, tokens: int) -> int:
        """Number of tiles for this many tokens."""
        return -(-tokens // self.tile_of(tokens))

    def last_tile(self, tokens: int) -> float:
        """Share of the tokens in the last tile."""
        size = self.tile_of(tokens)
        return (tokens - size * ((tokens - 1) // size)) / tokens

    @property
    def modules_of_halves(self) -> tuple[str, ...]:
        """Those modules that exist only where a forward and a backward are interleaved."""
        return tuple(name for name in self.recomputed_modules if name.startswith("a2a_overlap"))

    @property
    def moved_items(self) -> tuple[str, ...]:
        """What is offloaded, by the module that keeps it."""
        if not self.fine_grained_activation_offloading:
            return ()
        kept = (item for tensor in self.offload_tensors for item in _KEPT_BY[tensor])
        return (*self.offload_modules, *kept)

    @property
    def recomputes_first_layers(self) -> bool:
        """Whether only the first layers of a stage are recomputed, wholly or in modules."""
        return self.recompute_granularity is not None and self.recompute_method == "block"

    @property
    def without_recompute(self) -> "MemoryConfig":
        """The same settings without recomputation."""
        if self.recompute_granularity is None:
            return self
        kept = tuple(name for name in self.offload_tensors if name != "layer_input")
        return replace(
            self, recompute_granularity=None, tiled_mlp_num_shards=1, offload_tensors=kept
        )

    def of_stage(self, stage: int) -> "MemoryConfig":
        """The settings of one stage, with a single number of recomputed layers."""
        numbers = self.recompute_num_layers
        if not self.recomputes_first_layers or len(numbers) == 1:
            return self
        if numbers[stage] == 0:
            return self.without_recompute
        return replace(self, recompute_num_layers=(numbers[stage],))

    def of_layer(self, place: int) -> "MemoryConfig":
        """The settings of one layer, if modules are recomputed in the first layers of a stage.

        Args:
            place: its place in the stage; 0 for MTP modules, which are recomputed wherever
                the stage recomputes anything.
        """
        selects = self.recomputes_first_layers and self.recompute_granularity == "selective"
        if selects and place >= max(self.recompute_num_layers):
            return self.without_recompute
        return self

    def recomputed_groups(self, num_layers: int) -> list[tuple[range, bool]]:
        """The groups of consecutive layers of a stage, and whether each is recomputed as a whole.

        Call on the result of `of_stage`.
        """
        everything = range(num_layers)
        if self.recompute_granularity != "full":
            return [(everything, False)]
        (size,) = self.recompute_num_layers
        if self.recompute_method == "uniform":
            return [(everything[start : start + size], True) for start in everything[::size]]
        return [(range(i, i + 1), True) for i in everything[:size]] + [(everything[size:], False)]


NUM_WEIGHT_BUFFERS = 2
"""Buffers in host memory into which weights are read from a disk ahead of their use."""
UPDATE_BUCKET = 4 << 20
"""Elements of optimizer state off the device that are updated at once, wherever that is."""
NUM_UPDATE_BUFFERS = 3
"""Buffers through which buckets pass: one is read, one is updated, one is written back."""


def update_buffers(elements: int) -> tuple[int, int]:
    """The number of buffers through which buckets of this many elements pass, and the elements of
    each."""
    return (NUM_UPDATE_BUFFERS, UPDATE_BUCKET) if elements > UPDATE_BUCKET else (1, elements)


def buffer_size(elements: int, kept: Iterable[tuple[int, int]]) -> int:
    """Elements of one kind in a buffer through which buckets of this many elements pass.

    Args:
        elements: elements of the buffer.
        kept: for each parameter that passes, its elements, and the numbers of the kind that are
            kept of it: as many, or a scale for each block of a row, or none.
    """
    pairs = [(each, numbers) for each, numbers in kept if numbers]
    densest = max((elements * numbers // each for each, numbers in pairs), default=0)
    return min(densest, sum(numbers for _, numbers in pairs))


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
