"""The one count of what a forward keeps for its backward, module by module, in bytes per token.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
for a layer and its recomputation, with what fused attention, gated MLPs, experts, latents and 8-bit
inputs change of it. A tensor that two modules keep is counted once, with the first that keeps it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.training import ELEMENT_BYTES
from fivefold.model.shape import StageParts

_LOSS_CHUNK = 3072  # entries of the vocabulary that a fused output layer and loss hold at a time
_LOG_SUM_EXP = 4  # bytes, fp32; fp64 keeps its own
_ROUTING = 9  # bytes per token and expert: fp32 scores, fp32 probabilities, a bit map


@dataclass(frozen=True)
class Running:
    """How a layer is run, as far as what it keeps depends on it.

    Attributes:
        seq_length: tokens that a token may attend to; matters to attention that is not fused.
        element_bytes: of the compute type.
        input_bytes: of what linear layers keep of their inputs; less than an element in fp8, fp4.
        tensor_parallel: ranks that split heads, MLPs and vocabulary.
        sequence_parallel: whether they split the tokens of everything else.
        expert_tensor_parallel: ranks that split each expert.
        imbalance: tokens of this rank's experts, over their even share.
        fused_attention: whether a kernel without the S x S matrix computes attention; dropping
            probabilities needs the matrix.
        memory: what is recomputed, moved away or fused.
        microbatch_tokens: that pass a layer at once on this rank, before sequence parallelism
            splits them; the fewer, the more tensors are too small to be moved away.
    """

    seq_length: int
    element_bytes: float = 2
    input_bytes: float = 2
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_tensor_parallel: int = 1
    imbalance: float = 1.0
    fused_attention: bool = True
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    microbatch_tokens: float = inf

    @classmethod
    def of(
        cls, config: Config, *, imbalance: float = 1.0, fused_attention: bool = True
    ) -> "Running":
        """As a configuration says, which names its degrees of tensor parallelism."""
        training, parallel = config.training, config.parallel
        element = ELEMENT_BYTES[training.precision]
        parts = parallel.context_parallel_size * parallel.num_sequence_slices
        narrow = 0.5 if training.fp4_format else 1 if training.fp8_format else element
        return cls(
            seq_length=training.seq_length,
            element_bytes=element,
            input_bytes=narrow,
            tensor_parallel=parallel.tensor_model_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            expert_tensor_parallel=parallel.expert_tensor_parallel_size,
            imbalance=imbalance,
            fused_attention=fused_attention,
            memory=config.memory,
            microbatch_tokens=training.micro_batch_size * training.seq_length / parts,
        )

    @property
    def token_parts(self) -> int:
        """Parts into which tokens are split outside of heads, MLPs and vocabulary."""
        return self.tensor_parallel if self.sequence_parallel else 1


@dataclass(frozen=True)
class Saved:
    """Bytes per token of one module.

    Attributes:
        kept: on the device from the forward to the backward.
        offloaded: in host memory in the meantime.
        remade: made again by the backward, and there only while it runs.
    """

    kept: float = 0.0
    offloaded: float = 0.0
    remade: float = 0.0


def total(saved: Mapping[str, Saved] | Iterable[Saved]) -> Saved:
    """The sum over modules, or over layers."""
    items = list(saved.values() if isinstance(saved, Mapping) else saved)
    return Saved(
        sum(item.kept for item in items),
        sum(item.offloaded for item in items),
        sum(item.remade for item in items),
    )


def saved_activations(
    model: ModelConfig, layer: int, running: Running, *, position: int = 0
) -> dict[str, Saved]:
    """What one layer keeps for its backward, on one rank, per token, by module.

    Tokens are those of the rank's microbatch (batch x sequence / CP) before sequence parallelism
    splits them. Full recomputation keeps the layer's input, of each `recompute_num_layers`-th layer
    (uniform) or of the first so many (block); what its backward makes again is `remade`, and a
    uniform group makes all its layers at once.

    Args:
        model: the architecture.
        layer: its number in the model; from num_layers on, layers of multi-token prediction, with
            the norms and the projection before them.
        running: degrees, types and what is recomputed or moved away.
        position: its place among the layers of its stage, for full recomputation.
    """
    whole = _unabridged(model, layer, running)
    memory = running.memory
    if memory.recompute_granularity == "full" and _is_recomputed(memory, position):
        starts_group = memory.recompute_method == "block" or (
            position % memory.recompute_num_layers == 0
        )
        size = running.element_bytes * model.hidden_size / running.token_parts
        first = {"layer_input": Saved(kept=size)} if starts_group else {}
        return first | {name: Saved(remade=size) for name, size in whole.items()}
    remade = _remade(memory, whole)
    moved = _moved(memory)
    saved = {
        name: Saved(remade=size) if name in remade else Saved(kept=size)
        for name, size in whole.items()
    }
    for name in moved.intersection(whole) - remade:
        away = _large_enough(name, whole[name], model, running)
        saved[name] = Saved(kept=whole[name] - away, offloaded=away)
    return saved


def embedding_bytes(model: ModelConfig, running: Running) -> dict[str, Saved]:
    """What the input embedding keeps, per token: token numbers, and a dropout mask."""
    mask = model.hidden_size / running.token_parts if model.hidden_dropout else 0.0
    return {"tokens": Saved(kept=8.0), "embedding_dropout": Saved(kept=mask)}


def loss_bytes(model: ModelConfig, running: Running) -> dict[str, Saved]:
    """What the final norm, the output layer and the loss keep, per token, on one rank.

    Logits are kept in the compute type, and the loss widens them to fp32 when it is fused, for its
    gradient, unless that takes the place of the logits ("te"); when it is not, it holds the fp32
    copy, its exponentials and the logits at once. A loss that is fused with the output layer
    ("linear") holds a slice of the vocabulary at a time. With multi-token prediction the output
    layer runs once more for each further token; only one of them is in the middle of its loss.
    """
    memory, element = running.memory, running.element_bytes
    runs = 1 + model.mtp_num_layers
    around = model.hidden_size / running.token_parts
    entries = model.padded_vocab_size / running.tensor_parallel
    wide = max(element, 4)
    kept, busy, sums = element * entries, 2 * wide * entries, wide
    if memory.cross_entropy_loss_fusion:
        busy, sums = wide * entries, 0.0  # the gradient is made at once
        if memory.cross_entropy_fusion_impl == "te":
            busy = 0.0
        elif memory.cross_entropy_fusion_impl == "linear":
            kept, busy, sums = 0.0, (element + wide) * min(entries, _LOSS_CHUNK), wide
    return {
        "final_norm": Saved(kept=element * around),
        "output_layer": Saved(kept=runs * element * around),
        "logits": Saved(kept=runs * kept, remade=busy),
        "log_sum_exp": Saved(kept=runs * sums),
    }


def bookkeeping_bytes(
    model: ModelConfig, parts: StageParts, running: Running, *, smoothed: bool = False
) -> float:
    """What Fivefold's modules keep besides, per token of a stage: in no published formula.

    Row statistics of norms, RoPE tables, copies of labels and loss weights, or of their logits
    where the vocabulary is split, and its mask; `smoothed`: whether labels are.
    """
    wide, tp, tokens = max(running.element_bytes, 4), running.tensor_parallel, running.token_parts
    # PyTorch's layer norm keeps mean and deviation, on a CPU in the compute type.
    norm = (2 * running.element_bytes if model.normalization == "LayerNorm" else wide) / tokens
    size, layer = 0.0, 2 * norm
    if model.qk_layernorm:
        layer += wide * (model.num_attention_heads / tp + max(model.num_kv_heads / tp, 1))
    groups = running.memory.recomputed_groups(len(parts.layers))
    size += layer * sum(len(group) for group, again in groups if not again)
    if model.position_embedding_type == "rope":
        size += running.element_bytes * 1.5 * model.head_dim  # cosines of all, sines of half
    if parts.embedding and tp > 1:
        size += 1.0
    if parts.head:
        size += norm
        if not running.memory.cross_entropy_loss_fusion:
            size += wide * (1 + smoothed) if tp > 1 else 8.0 + wide
        elif running.memory.cross_entropy_fusion_impl == "linear":
            size += wide * (2 + smoothed)
    return size


def _unabridged(model: ModelConfig, layer: int, running: Running) -> dict[str, float]:
    """Module -> bytes per token, with nothing recomputed and nothing moved."""
    mlp = _experts(model, running) if model.is_moe(layer) else _dense_mlp(model, running)
    sizes = _attention(model, running) | mlp
    if layer >= model.num_layers:
        sizes |= _prediction(model, running)
    return {name: size for name, size in sizes.items() if size}


def _attention(model: ModelConfig, running: Running) -> dict[str, float]:
    """Norm, projections, attention and output projection; query/key norms where there are some."""
    element, narrow = running.element_bytes, running.input_bytes
    heads, tokens = running.tensor_parallel, running.token_parts
    h, a = model.hidden_size, model.num_attention_heads
    narrower_output = element * model.attention_size if narrow < element else 0.0
    if running.fused_attention and not model.attention_dropout:
        inside = max(_LOG_SUM_EXP, element) * a + narrower_output
    else:
        per_score = element + (element + 1 if model.attention_dropout else 0)
        inside = per_score * a * running.seq_length
    sizes = {
        "attn_norm": element * h / tokens,
        "qkv": narrow * h / tokens,
        "core_attn": sum(_attended(model, running)),
        "attn_scores": inside / heads,
        "attn_proj": narrow * model.attention_size / heads,
        "attn_dropout": h / tokens if model.hidden_dropout else 0.0,
    }
    if model.multi_latent_attention:
        latents = (model.q_lora_rank or 0) + model.kv_lora_rank
        sizes["latents"] = element * latents / tokens
        sizes["mla_up_proj"] = narrow * latents / tokens
    elif model.qk_layernorm:
        sizes["qk_norm"] = sum(_attended(model, running)[:2])
    return sizes


def _attended(model: ModelConfig, running: Running) -> tuple[float, float, float]:
    """Bytes per token of queries, keys and values."""
    element, heads = running.element_bytes, running.tensor_parallel
    key_heads = min(heads, model.num_kv_heads)  # parts of keys and values: a rank has one at least
    q, k, v = model.q_size / heads, model.k_size / key_heads, model.v_size / key_heads
    return element * q, element * k, element * v


def _dense_mlp(model: ModelConfig, running: Running) -> dict[str, float]:
    element, narrow, tokens = running.element_bytes, running.input_bytes, running.token_parts
    inner = model.ffn_size / running.tensor_parallel
    return {
        "mlp_norm": element * model.hidden_size / tokens,
        "fc1": narrow * model.hidden_size / tokens,
        "mlp_act": element * _activated(model) * inner,
        "fc2": narrow * inner,
        "mlp_dropout": model.hidden_size / tokens if model.hidden_dropout else 0.0,
    }


def _experts(model: ModelConfig, running: Running) -> dict[str, float]:
    """Router, the rows that reach this rank's experts, their outputs, and the shared experts.

    Each of a token's K copies is a row. The ranks of an expert's tensor group all have its rows, of
    which each computes a part of the inner features.
    """
    assert model.num_experts is not None
    element, narrow, tokens = running.element_bytes, running.input_bytes, running.token_parts
    h, split = model.hidden_size, running.expert_tensor_parallel
    copies = model.moe_router_topk / tokens
    rows = copies * split * running.imbalance
    inner = model.expert_ffn_size / split
    shared = model.shared_ffn_size / running.tensor_parallel
    cast = narrow * h / tokens if shared and narrow < element else 0.0
    return {
        "mlp_norm": element * h / tokens,
        "moe_input": element * h / tokens,
        "router": _ROUTING * model.num_experts / tokens,
        "expert_fc1": narrow * h * rows,
        "moe_act": element * _activated(model) * inner * rows,
        "expert_fc2": narrow * inner * rows,
        "combine": element * h * copies,
        "shared_experts": cast + (element * _activated(model) + narrow) * shared,
        "mlp_dropout": h / tokens if model.hidden_dropout else 0.0,
    }


def _prediction(model: ModelConfig, running: Running) -> dict[str, float]:
    """What stands around a layer of further prediction: three norms and a projection 2h -> h."""
    size = model.hidden_size / running.token_parts
    return {
        "mtp_norms": 3 * running.element_bytes * size,
        "mtp_proj": 2 * running.input_bytes * size,
    }


def _activated(model: ModelConfig) -> int:
    """Tensors as wide as the MLP that its activation keeps, its output apart.

    A fused SwiGLU keeps gate and up; any other gate also its activated form.
    """
    if not model.gated_linear_unit:
        return 1
    return 2 if model.activation_func == "silu" else 3


def _is_recomputed(memory: MemoryConfig, position: int) -> bool:
    return memory.recompute_method == "uniform" or position < memory.recompute_num_layers


_REMADE: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("attn_scores",),
    "mlp": ("mlp_act", "fc2"),
    "moe": ("router", "expert_fc1", "moe_act", "expert_fc2", "combine", "shared_experts"),
    "moe_act": ("expert_fc2",),
    "shared_experts": ("shared_experts",),
    "routed_experts": ("moe_act", "expert_fc2"),
    "layernorm": ("qkv", "fc1", "moe_input"),
    "mla_up_proj": ("core_attn",),
}
"""Module of recompute_modules -> the items that it does not keep; its inputs are kept."""


def _remade(memory: MemoryConfig, whole: Mapping[str, float]) -> set[str]:
    if memory.recompute_granularity != "selective":
        return set()
    remade = {name for module in memory.recompute_modules for name in _REMADE[module]}
    if "latents" not in whole:
        remade.discard("core_attn")  # only latents can make queries, keys and values again
    return remade


def _moved(memory: MemoryConfig) -> set[str]:
    """Offloaded items: Megatron's module names are those of the items, its core_attn is two."""
    if not memory.fine_grained_activation_offloading:
        return set()
    moved = set(memory.offload_modules)
    return moved | ({"attn_scores"} if "core_attn" in moved else set())


def _large_enough(name: str, size: float, model: ModelConfig, running: Running) -> float:
    """Bytes per token of an item's tensors that are not too small to be moved."""
    least = running.memory.min_offloaded_tensor_size / running.microbatch_tokens
    tensors = _attended(model, running) if name == "core_attn" else (size,)
    return sum(tensor for tensor in tensors if tensor >= least)
