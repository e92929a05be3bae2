"""The one count: parameters and FLOPs of a model, from its configuration alone.

Conventions, each as the literature that readers compare with has it:
- FLOPs are model FLOPs: a multiply-add is two; norms, activations, softmax and the input embedding
  are free; nothing is added for recomputation. Training is three times the forward. Of a layer's
  experts, those count that a token is sent to.
- Attention is causal: a token attends to half the sequence on average.
- Vocabularies are the padded ones, since those are what is held and multiplied, unless asked.

What is kept between forward and backward is counted in `model.activations`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Protocol

from fivefold.config.model import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]


class StageParts(Protocol):
    """What a pipeline stage holds of the model."""

    @property
    def embedding(self) -> bool:
        """Whether it holds the input embedding."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers it holds, as numbers in the whole model."""

    @property
    def head(self) -> bool:
        """Whether it holds the final norm, the output layer and the loss."""

    @property
    def mtp(self) -> int:
        """How many layers of multi-token prediction it holds: all, or none."""


@dataclass(frozen=True)
class WholeModel:
    """A stage that holds everything."""

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True
    mtp: int = 0


def whole_model(model: ModelConfig) -> WholeModel:
    """The stage that holds all of `model`."""
    return WholeModel(tuple(range(model.num_layers)), mtp=model.mtp_num_layers)


def canonical_name(model: ModelConfig, name: str) -> str:
    """The name under which a parameter is initialised and stored.

    With tied embeddings the last pipeline stage owns a copy, `lm_head.weight`, of
    `embed_tokens.weight`; every other parameter has one name.
    """
    tied = not model.untie_embeddings_and_output_weights
    return "embed_tokens.weight" if tied and name == "lm_head.weight" else name


def layer_shapes(model: ModelConfig, layer: int) -> Shapes:
    """Name in the layer -> global shape, for every parameter of one transformer layer.

    All experts of a layer are one parameter, [E, out, in]. From `num_layers` on, the number means a
    layer of multi-token prediction, here without what stands around it (`prediction_shapes`).
    """
    return _layer_shapes(model, model.is_moe(layer))


def prediction_shapes(model: ModelConfig) -> Shapes:
    """Name -> global shape of one module of multi-token prediction, its layer included.

    As in DeepSeek-V3: it norms the hidden state and the next token's embedding, projects both
    together to one hidden state, and runs a layer and a norm; embedding and output layer are the
    model's own.
    """
    h = model.hidden_size
    shapes = _norm("hnorm", model, h) | _norm("enorm", model, h)
    shapes |= _linear("eh_proj", 2 * h, h, False)
    in_layer = layer_shapes(model, model.num_layers)
    shapes |= {f"layer.{name}": shape for name, shape in in_layer.items()}
    return shapes | _norm("norm", model, h)


def embedding_shapes(model: ModelConfig) -> Shapes:
    """Name -> global shape, for the parameters at the model's input."""
    shapes = {"embed_tokens.weight": (model.padded_vocab_size, model.hidden_size)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embed_positions.weight"] = (model.max_position_embeddings, model.hidden_size)
    return shapes


def head_shapes(model: ModelConfig) -> Shapes:
    """Name -> global shape, for the parameters at the model's output, a tied weight included."""
    norm = _norm("norm", model, model.hidden_size)
    return norm | {"lm_head.weight": (model.padded_vocab_size, model.hidden_size)}


def parameter_shapes(model: ModelConfig, parts: StageParts | None = None) -> Shapes:
    """Global name -> global shape, for every parameter that a stage (default: all) owns.

    A tied output weight is listed only where the input embedding is not in the same stage. A stage
    that predicts further tokens without holding the embedding has a copy of it.
    """
    parts = parts or whole_model(model)
    shapes: dict[str, tuple[int, ...]] = {}
    if parts.embedding:
        shapes |= embedding_shapes(model)
    for layer in parts.layers:
        in_layer = layer_shapes(model, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in in_layer.items()}
    for depth in range(parts.mtp):
        in_module = prediction_shapes(model)
        shapes |= {f"mtp.{depth}.{name}": shape for name, shape in in_module.items()}
    if parts.head:
        head = head_shapes(model)
        shapes |= {n: s for n, s in head.items() if canonical_name(model, n) not in shapes}
    if _copies_embedding(model, parts):
        shapes["embed_tokens.weight"] = (model.padded_vocab_size, model.hidden_size)
    return shapes


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to the experts of a layer, and so to the expert mesh."""
    return ".experts." in name


def local_shape(
    model: ModelConfig, name: str, shape: tuple[int, ...], *, tp: int = 1, ep: int = 1, etp: int = 1
) -> tuple[int, ...]:
    """What one rank holds of a parameter, before data-parallel sharding.

    Experts are split over `ep`, and each of them over `etp`; all else over `tp`, see `split_dim`.
    """
    expert, dim, sizes = is_expert(name), split_dim(model, name, tp=tp), list(shape)
    if expert:
        sizes[0] //= ep
    if dim is not None:
        sizes[dim] //= etp if expert else tp
    return tuple(sizes)


def split_dim(model: ModelConfig, name: str, *, tp: int) -> int | None:
    """The dim that tensor-parallel ranks (`etp` of them, if it is an expert's) split.

    Projections into heads, inner features or vocabulary are split by rows, as are the sinks of
    heads; projections out of them by columns (their bias is whole). All else is whole, which is
    None: norms, the router, projections into latents, and keys and values whose heads are fewer
    than the ranks.
    """
    *_, module, kind = name.split(".")
    rows = 1 if is_expert(name) else 0
    if module in _BY_ROWS and not (module in _KEY_VALUE and model.num_kv_heads % tp):
        return rows
    return rows + 1 if module in _BY_COLUMNS and kind == "weight" else None


_KEY_VALUE = ("k_proj", "v_proj")
_BY_ROWS = (
    *("sinks", "q_proj", *_KEY_VALUE, "q_b_proj", "kv_b_proj"),
    *("gate_proj", "up_proj", "eh_proj", "embed_tokens", "lm_head"),
)
_BY_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by place; a tied weight counts with the embedding if both are there."""

    embedding: int
    layers: int
    head: int
    mtp: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.layers + self.head + self.mtp


def count_parameters(
    model: ModelConfig,
    parts: StageParts | None = None,
    *,
    padded: bool = True,
    active: bool = False,
) -> ParameterCount:
    """Parameters that a stage (default: the whole model) owns.

    Args:
        model: the architecture.
        parts: what the stage holds.
        padded: whether to count the padding of the vocabulary.
        active: of the experts, count as many as a token is sent to.
    """
    parts = parts or whole_model(model)
    shared = parts.embedding and not model.untie_embeddings_and_output_weights
    padding = 0 if padded else (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    head = {n: s for n, s in head_shapes(model).items() if not (shared and n == "lm_head.weight")}
    embedding = (_size(embedding_shapes(model)) - padding) if parts.embedding else 0
    if _copies_embedding(model, parts):
        embedding = model.padded_vocab_size * model.hidden_size - padding
    predictions = _sizes(model, active).prediction * parts.mtp
    return ParameterCount(
        embedding=embedding,
        layers=sum(
            _sizes(model, active).of_layer(is_moe) * count for is_moe, count in _kinds(model, parts)
        ),
        head=(_size(head) - (0 if shared else padding)) if parts.head else 0,
        mtp=predictions,
    )


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.matmul + self.attention


def forward_flops(
    model: ModelConfig,
    seq_length: int,
    parts: StageParts | None = None,
    *,
    causal: bool = True,
) -> Flops:
    """FLOPs per token of a stage's (default: the whole model's) forward.

    2 x weights of the linear layers (router, chosen experts and output layer among them), and per
    layer 2 x sequence x heads x (key + value features of a head) for attention, of which a causal
    one computes half, and one with a window what is in it. The output layer runs once for each
    token that is predicted.
    """
    parts = parts or whole_model(model)
    layers = len(parts.layers) + parts.mtp
    linear = _sizes(model, active=True, linear=True)
    weights = sum(linear.of_layer(is_moe) * count for is_moe, count in _kinds(model, parts))
    weights += linear.prediction * parts.mtp
    if parts.head:
        weights += (1 + model.mtp_num_layers) * model.padded_vocab_size * model.hidden_size
    attention = 2 * (model.q_size + model.attention_size) * layers
    return Flops(2 * weights, int(attention * _mean_keys(model, seq_length, causal)))


def _mean_keys(model: ModelConfig, seq_length: int, causal: bool) -> float:
    """How many keys a query sees in the mean: half of all, or its window where that is less."""
    if not causal:
        return seq_length
    window = min(model.window_size or seq_length, seq_length)
    return window - window**2 / (2 * seq_length)


def training_flops(
    model: ModelConfig,
    seq_length: int,
    parts: StageParts | None = None,
    *,
    causal: bool = True,
) -> Flops:
    """FLOPs per token of forward and backward: 6 x linear weights, and attention three times."""
    forward = forward_flops(model, seq_length, parts, causal=causal)
    return Flops(matmul=3 * forward.matmul, attention=3 * forward.attention)


@lru_cache(maxsize=256)
def _layer_shapes(model: ModelConfig, is_moe: bool) -> Shapes:
    h = model.hidden_size
    shapes = _norm("input_layernorm", model, h)
    shapes |= _latent_attention(model) if model.multi_latent_attention else _attention(model)
    if model.softmax_type == "learnable":
        shapes["self_attn.sinks.weight"] = (model.num_attention_heads,)
    shapes |= _linear("self_attn.o_proj", model.attention_size, h, model.add_bias_linear)
    shapes |= _norm("post_attention_layernorm", model, h)
    shapes |= _experts(model) if is_moe else _mlp("mlp", model, model.ffn_size)
    return MappingProxyType(shapes)


def _attention(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, bias = model.hidden_size, model.qkv_bias
    shapes = _linear("self_attn.q_proj", h, model.q_size, bias)
    shapes |= _linear("self_attn.k_proj", h, model.k_size, bias)
    shapes |= _linear("self_attn.v_proj", h, model.v_size, bias)
    if model.qk_layernorm:
        shapes |= {f"self_attn.{x}_norm.weight": (model.head_dim,) for x in "qk"}
    return shapes


def _latent_attention(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """DeepSeek-V2's MLA: latents are normalised; the rotary key is one for all heads."""
    h, bias, r = model.hidden_size, model.add_bias_linear, model.kv_lora_rank
    if model.q_lora_rank is None:
        shapes = _linear("self_attn.q_proj", h, model.q_size, bias)
    else:
        shapes = _linear("self_attn.q_a_proj", h, model.q_lora_rank, bias)
        shapes |= _norm("self_attn.q_a_layernorm", model, model.q_lora_rank)
        shapes |= _linear("self_attn.q_b_proj", model.q_lora_rank, model.q_size, bias)
    shapes |= _linear("self_attn.kv_a_proj", h, r + model.qk_pos_emb_head_dim, bias)
    shapes |= _norm("self_attn.kv_a_layernorm", model, r)
    unrotated = model.num_attention_heads * model.qk_head_dim
    return shapes | _linear("self_attn.kv_b_proj", r, unrotated + model.v_size, bias)


def _mlp(name: str, model: ModelConfig, inner: int) -> dict[str, tuple[int, ...]]:
    h, bias = model.hidden_size, model.add_bias_linear
    shapes = _linear(f"{name}.gate_proj", h, inner, bias) if model.gated_linear_unit else {}
    shapes |= _linear(f"{name}.up_proj", h, inner, bias)
    return shapes | _linear(f"{name}.down_proj", inner, h, bias)


def _experts(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    assert model.num_experts is not None
    experts = model.num_experts
    shapes = _linear("mlp.router", model.hidden_size, experts, model.add_bias_linear)
    each = _mlp("mlp.experts", model, model.expert_ffn_size)
    shapes |= {name: (experts, *shape) for name, shape in each.items()}
    if model.shared_ffn_size:
        shapes |= _mlp("mlp.shared_experts", model, model.shared_ffn_size)
    return shapes


@dataclass(frozen=True)
class _Sizes:
    """Parameters of a dense layer, of one with experts, and of a module of further prediction."""

    dense: int
    moe: int
    prediction: int

    def of_layer(self, is_moe: bool) -> int:
        return self.moe if is_moe else self.dense


@lru_cache(maxsize=256)
def _sizes(model: ModelConfig, active: bool = False, linear: bool = False) -> _Sizes:
    """How large the kinds of layers are.

    Args:
        model: the architecture.
        active: of the experts, count as many as a token is sent to.
        linear: count only what is multiplied with: no norms, no biases.
    """

    def size(shapes: Shapes) -> int:
        kept = {n: s for n, s in shapes.items() if not linear or _is_matrix(n, s)}
        experts = _size({n: s for n, s in kept.items() if is_expert(n)})
        chosen = experts * model.moe_router_topk // (model.num_experts or 1)
        return _size(kept) - experts + (chosen if active else experts)

    return _Sizes(
        dense=size(_layer_shapes(model, False)),
        moe=size(_layer_shapes(model, True)) if model.num_experts else 0,
        prediction=size(prediction_shapes(model)),
    )


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith(".weight") and len(shape) > 1


def _kinds(model: ModelConfig, parts: StageParts) -> Iterator[tuple[bool, int]]:
    """(whether they have experts, how many) of a stage's layers."""
    yield from Counter(map(model.is_moe, parts.layers)).items()


def _copies_embedding(model: ModelConfig, parts: StageParts) -> bool:
    """Whether a stage needs the embedding for further prediction and has it in no other role."""
    tied_here = parts.head and not model.untie_embeddings_and_output_weights
    return parts.mtp > 0 and not parts.embedding and not tied_here


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    return shapes | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, model: ModelConfig, features: int) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{kind}": (features,) for kind in kinds}


def _size(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
