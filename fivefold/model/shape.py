"""The one count: parameters, FLOPs and activation bytes of a model, from its configuration alone.

Conventions, each as the literature that readers compare with has it:
- FLOPs are model FLOPs: a multiply-add is two; norms, activations, softmax and the input embedding
  are free; nothing is added for recomputation. Training is three times the forward.
- Attention is causal: a token attends to half the sequence on average.
- Vocabularies are the padded ones, since those are what is held and multiplied, unless asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
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


@dataclass(frozen=True)
class WholeModel:
    """A stage that holds everything."""

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True


def whole_model(model: ModelConfig) -> WholeModel:
    """The stage that holds all of `model`."""
    return WholeModel(tuple(range(model.num_layers)))


def canonical_name(model: ModelConfig, name: str) -> str:
    """The name under which a parameter is initialised and stored.

    With tied embeddings the last pipeline stage owns a copy, `lm_head.weight`, of
    `embed_tokens.weight`; every other parameter has one name.
    """
    tied = not model.untie_embeddings_and_output_weights
    return "embed_tokens.weight" if tied and name == "lm_head.weight" else name


def layer_shapes(model: ModelConfig) -> Shapes:
    """Name in the layer -> global shape, for every parameter of one transformer layer."""
    h, f, q, kv = model.hidden_size, model.ffn_size, model.q_size, model.kv_size
    bias = model.add_bias_linear
    shapes = _norm("input_layernorm", model, h)
    shapes |= _linear("self_attn.q_proj", h, q, model.qkv_bias)
    shapes |= _linear("self_attn.k_proj", h, kv, model.qkv_bias)
    shapes |= _linear("self_attn.v_proj", h, kv, model.qkv_bias)
    shapes |= _linear("self_attn.o_proj", q, h, bias)
    if model.qk_layernorm:
        shapes |= {f"self_attn.{x}_norm.weight": (model.head_dim,) for x in "qk"}
    shapes |= _norm("post_attention_layernorm", model, h)
    if model.gated_linear_unit:
        shapes |= _linear("mlp.gate_proj", h, f, bias)
    shapes |= _linear("mlp.up_proj", h, f, bias)
    return shapes | _linear("mlp.down_proj", f, h, bias)


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

    A tied output weight is listed only where the input embedding is not in the same stage.
    """
    parts = parts or whole_model(model)
    shapes: dict[str, tuple[int, ...]] = {}
    if parts.embedding:
        shapes |= embedding_shapes(model)
    in_layer = layer_shapes(model)
    for layer in parts.layers:
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in in_layer.items()}
    if parts.head:
        head = head_shapes(model)
        shapes |= {n: s for n, s in head.items() if canonical_name(model, n) not in shapes}
    return shapes


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by place; a tied weight counts with the embedding if both are there."""

    embedding: int
    layers: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.layers + self.head


def count_parameters(
    model: ModelConfig, parts: StageParts | None = None, *, padded: bool = True
) -> ParameterCount:
    """Parameters that a stage (default: the whole model) owns.

    Args:
        model: the architecture.
        parts: what the stage holds.
        padded: whether to count the padding of the vocabulary.
    """
    parts = parts or whole_model(model)
    shared = parts.embedding and not model.untie_embeddings_and_output_weights
    padding = 0 if padded else (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    head = {n: s for n, s in head_shapes(model).items() if not (shared and n == "lm_head.weight")}
    return ParameterCount(
        embedding=(_size(embedding_shapes(model)) - padding) if parts.embedding else 0,
        layers=_size(layer_shapes(model)) * len(parts.layers),
        head=(_size(head) - (0 if shared else padding)) if parts.head else 0,
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

    2 x weights of the linear layers, the output layer among them, and per layer 4 x sequence x
    heads x head size for attention, of which a causal one computes half.
    """
    parts = parts or whole_model(model)
    in_layer = sum(prod(shape) for shape in layer_shapes(model).values() if len(shape) == 2)
    in_head = model.padded_vocab_size * model.hidden_size if parts.head else 0
    attention = 4 * seq_length * model.q_size * len(parts.layers)
    return Flops(
        matmul=2 * (in_layer * len(parts.layers) + in_head),
        attention=attention // 2 if causal else attention,
    )


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


def activation_bytes(
    model: ModelConfig,
    seq_length: int,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    element_bytes: int = 2,
) -> float:
    """Bytes per token that one layer saves for its backward, on one rank of the tensor axis.

    Counted as saved, per token: the inputs of both norms and their outputs (4 h elements; split
    over the ranks by sequence parallelism only); q, k, v, the attention's output and its
    log-sum-exp (fp32); the q/k norms' inputs; and the MLP's inner tensors, of which a fused SwiGLU
    saves gate, up and their product. Dropout adds one byte per mask element, and attention dropout
    the probabilities before and after it, since no fused kernel then applies.
    """
    e, t = element_bytes, tensor_parallel
    around = 4 * e * model.hidden_size + (2 * model.hidden_size if model.hidden_dropout else 0)
    heads = 2 * e * (model.q_size + model.kv_size)
    if model.qk_layernorm:
        heads += e * (model.q_size + model.kv_size)
    if model.attention_dropout:
        heads += (2 * e + 1) * model.num_attention_heads * seq_length
    else:
        heads += 4 * model.num_attention_heads
    mlp = e * model.ffn_size * (3 if model.gated_linear_unit else 2)
    return around / (t if sequence_parallel else 1) + (heads + mlp) / t


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    return shapes | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, model: ModelConfig, features: int) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{kind}": (features,) for kind in kinds}


def _size(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
