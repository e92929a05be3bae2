"""Llama and related families: RMSNorm, RoPE, a gated MLP, no biases unless the family has them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Fields
from fivefold.config.huggingface.fields import activation_name, rope_fields, size_fields
from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, whole_head_rope
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.model import ModelConfig

ACTIVATIONS: Mapping[str, Any] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "relu": "relu",
        "relu2": "squared_relu",
    }
)
Settings = dict[str, Any]
"""Of a ModelConfig."""


def no_biases(reader: Reader) -> Settings:
    """For families without the fields, or where one would affect attention only."""
    reader.fixed("attention_bias", False)
    reader.fixed("mlp_bias", False)
    return {}


def attention_biases(reader: Reader) -> Settings:
    """Of families with a field for attention alone, its output among it."""
    reader.fixed("mlp_bias", False)
    biased = reader.flag("attention_bias", False)
    return {"add_qkv_bias": biased, "attention_out_bias": biased}


def both_biases(reader: Reader, default: bool = False) -> Settings:
    """Of families with a field for attention, its output among it, and one for MLPs."""
    attention, mlp = reader.flag("attention_bias", default), reader.flag("mlp_bias", default)
    if attention and mlp:
        return {"add_bias_linear": True}
    return {"add_qkv_bias": attention, "attention_out_bias": attention, "mlp_bias": mlp}


def qkv_biases(default: bool) -> Callable[[Reader], Settings]:
    """For families whose attention_bias means queries, keys and values, without the output."""
    return lambda reader: {"add_qkv_bias": reader.flag("attention_bias", default)}


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """A relative of Llama: how it differs, and its defaults for absent fields.

    Attributes:
        num_key_value_heads: key/value heads; None: as many as query heads.
        head_dim: features of a head; None: hidden size / heads.
        rms_norm_eps: epsilon of norms.
        rope_theta: base of RoPE.
        rotary_share: share of a head's features that RoPE rotates.
        tied: whether embeddings are tied.
        activation: activation function of the MLP, as files have it.
        own_activations: activation functions that only this family has, with our names.
        norms: which norms the family has around attention and MLP.
        heads: how it normalises heads of queries and keys; None: it does not.
        null_head_dim: whether transformers takes a null for the head's default.
        null_key_value_heads: whether it takes a null for as many as query heads.
        epsilon: name of the norms' epsilon.
        hidden_act: name of the activation function.
        dense: whether there may be layers whose MLP is dense, which have a size.
        biases: reads which linear layers have biases.
        windows: reads which layers have a window, of so many; None: the family does so by itself.
        rope: reads RoPE, by its default; None: the family does so by itself.
        code: whether it was published with code of its own before transformers had it.
        rounded: whether it was published with code and rounded weights.
        padded: whether transformers has a token for padding by default, which may be outside of
            the vocabulary.
    """

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rotary_share: float = 1.0
    tied: bool = False
    activation: str = "silu"
    own_activations: tuple[str, ...] = ()
    norms: Literal["before", "after", "both"] = "before"
    heads: Literal["per_head", "all_heads"] | None = None
    null_head_dim: bool = False
    null_key_value_heads: bool = True
    epsilon: str = "rms_norm_eps"
    hidden_act: str = "hidden_act"
    dense: bool = True
    biases: Callable[[Reader], Settings] = no_biases
    windows: Callable[[Reader, int], Settings] | None = windows.none
    rope: Callable[[Reader, Rope], Rope] | None = whole_head_rope
    code: bool = False
    rounded: bool = False
    padded: bool = False

    def read(self, reader: Reader) -> ModelConfig:
        """The dense model; mixtures of experts replace its MLPs."""
        sizes = transformer_sizes(reader)
        groups = reader.optional_size if self.null_key_value_heads else reader.size
        head_dim = reader.optional_size if self.null_head_dim else reader.size
        read_stored_weights(reader, code=self.code or self.rounded, rounded=self.rounded)
        rope = Rope(self.rope_theta, self.rotary_share, "default")
        return ModelConfig(
            **sizes,
            ffn_hidden_size=reader.size("intermediate_size") if self.dense else None,
            num_query_groups=groups("num_key_value_heads", default=self.num_key_value_heads),
            kv_channels=head_dim("head_dim", default=self.head_dim),
            norm_epsilon=reader.number(self.epsilon, self.rms_norm_eps),
            activation_func=activation(
                reader, self.hidden_act, self.activation, self.own_activations
            ),
            **self.biases(reader),
            qk_layernorm=self.heads is not None,
            qk_layernorm_type=self.heads or "per_head",
            untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", self.tied),
            attention_dropout=reader.number("attention_dropout", 0.0),
            norm_placement=self.norms,
            **(self.windows(reader, sizes["num_layers"]) if self.windows is not None else {}),
            **(self.rope(reader, rope).settings() if self.rope is not None else {}),
        )

    def write(self, model: ModelConfig) -> Fields:
        """Fields of a dense model without windows and biases."""
        fields = {
            **size_fields(model),
            "intermediate_size": model.ffn_size,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "rms_norm_eps": model.norm_epsilon,
            "hidden_act": activation_name(model),
            "attention_dropout": model.attention_dropout,
            **rope_fields(model),
        }
        return fields | ({"pad_token_id": None} if self.padded else {})


def bias_fields(model: ModelConfig) -> Fields:
    """Of `both_biases`."""
    return {"attention_bias": model.output_bias, "mlp_bias": model.inner_bias}


def transformer_sizes(reader: Reader) -> dict[str, Any]:
    """Settings that most families give by the same names."""
    return {
        "num_layers": reader.size("num_hidden_layers", most=MAX_LAYERS),
        "hidden_size": reader.size("hidden_size"),
        "num_attention_heads": reader.size("num_attention_heads"),
        "vocab_size": reader.size("vocab_size"),
        "max_position_embeddings": reader.size("max_position_embeddings"),
        "init_method_std": reader.number("initializer_range", 0.02),
    }


def activation(reader: Reader, name: str, default: str, own: tuple[str, ...] = ()) -> Any:
    """Activation function of the MLP, under Fivefold's name; `own` are more, by these names."""
    known = {**ACTIVATIONS, **dict(zip(own, own, strict=True))}
    word = reader.text(name, default=default, choices=known)
    return known[word or default]


def refuse_head_dim(
    reader: Reader, model: ModelConfig, why: str = "hidden_size / num_attention_heads"
) -> None:
    """Report heads that together do not have the features of a hidden state."""
    usual = model.hidden_size // model.num_attention_heads
    if model.head_dim != usual:
        reader.unsupported("head_dim", model.head_dim, [usual], why)


def dropouts(reader: Reader, branches: str, embeddings: str, default: float) -> Settings:
    """Dropout of residual branches and of embeddings, by their names."""
    dropout, embedded = (reader.number(name, default) for name in (branches, embeddings))
    own = None if embedded == dropout else embedded
    return {"hidden_dropout": dropout, "embedding_dropout": own}
