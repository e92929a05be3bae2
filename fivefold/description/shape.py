"""Parameter and FLOP counts of a model, from its configuration alone.

Conventions, as in the literature:
- FLOPs are model FLOPs. A multiply-add is two FLOPs; norms, activations, softmax and the input
  embedding are free; recomputation adds nothing. Training is three times the forward. Of a layer's
  experts, only those that a token is sent to count.
- Attention is causal: a token attends to half the sequence on average.
- Vocabularies include padding, since it is held and multiplied, unless requested otherwise.

`description.activations` counts what is kept between forward and backward.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from fivefold.config.model import ModelConfig
from fivefold.config.reach import Reach
from fivefold.description.core_attention import CoreAttention
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.layers import describe, describe_layer
from fivefold.description.linear_attention import Recurrence
from fivefold.description.prediction import MTPInput
from fivefold.description.sparse import index_flops_per_key
from fivefold.description.weights import Weight, embedding_weights, head_weights

Shapes = Mapping[str, tuple[int, ...]]
Weights = Mapping[str, Weight]


class StageParts(Protocol):
    """The parts of the model that a pipeline stage holds."""

    @property
    def embedding(self) -> bool:
        """Whether it holds the input embedding."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices in the model of the layers it holds."""

    @property
    def head(self) -> bool:
        """Whether it holds the output layer and the loss."""

    @property
    def mtp(self) -> int:
        """Number of MTP modules that it has: all or 0."""


@dataclass(frozen=True)
class ModelParts:
    """Any parts of the model, as `StageParts` names them; none unless given."""

    layers: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False
    mtp: int = 0


def whole_model(model: ModelConfig) -> ModelParts:
    """All parts of the model."""
    layers, further = tuple(range(model.num_layers)), model.mtp_num_layers
    return ModelParts(layers, embedding=True, head=True, mtp=further)


def all_layers(model: ModelConfig, parts: StageParts) -> tuple[int, ...]:
    """The layers of a stage, those of multi-token prediction last."""
    first = model.num_layers
    return *parts.layers, *range(first, first + parts.mtp * model.prediction_size)


def placed_layers(model: ModelConfig, parts: StageParts) -> list[tuple[int, int]]:
    """The layers of a stage with their places, by which some of them are recomputed.

    Those of multi-token prediction come last, each at place 0: they are recomputed where the stage
    recomputes anything, and a prediction by itself.
    """
    return [
        (place if layer < model.num_layers else 0, layer)
        for place, layer in enumerate(all_layers(model, parts))
    ]


def canonical_name(model: ModelConfig, name: str) -> str:
    """The name under which a parameter is initialised and stored.

    With tied embeddings the last pipeline stage owns a copy of `embed_tokens.weight` named
    `lm_head.weight`. A stage with MTP modules may own another copy,
    `mtp_embed_tokens.weight`. Every other parameter has one name.
    """
    return EMBEDDING if name in embedding_names(model) else name


EMBEDDING = "embed_tokens.weight"


def embedding_names(model: ModelConfig) -> tuple[str, ...]:
    """The names of the token embedding and of all copies that stages may hold."""
    output = () if model.untie_embeddings_and_output_weights else ("lm_head.weight",)
    return EMBEDDING, *output, "mtp_embed_tokens.weight"


def sets_of_predictions(model: ModelConfig, parts: StageParts) -> int:
    """Sets of weights of a stage's MTP modules."""
    return min(parts.mtp, model.prediction_sets)


def prediction_prefixes(model: ModelConfig, depth: int) -> dict[str, int]:
    """Name prefixes of the parameters of a set of prediction weights, and the first layers that
    have them."""
    first = model.num_layers + depth * model.prediction_size
    if model.mtp_hybrid_override_pattern is None:
        return {f"mtp.{depth}.layer.": first}
    return {f"mtp.{depth}.layer.{n}.": first + n for n in range(model.prediction_size)}


def kinds_of(model: ModelConfig, layers: Iterable[int]) -> Counter[LayerKind]:
    """The number of layers of each kind among `layers`, in the order in which they come."""
    return Counter(layer_kind(model, layer) for layer in layers)


def is_layer_matrix(name: str, weight: Weight) -> bool:
    """Whether a parameter is a matrix of the model's layers, and neither an embedding nor the
    output layer."""
    return weight.multiplies and name.startswith(("layers.", "mtp."))


def has_final_norm(model: ModelConfig, parts: StageParts) -> bool:
    """Whether a stage holds the final norm, which precedes the output layer and all prediction."""
    return parts.mtp > 0 if model.mtp_num_layers else parts.head


def rotations(model: ModelConfig, parts: StageParts) -> frozenset[bool]:
    """For the layers of a stage with RoPE: whether they are those of `is_local`."""
    rotated = filter(model.rotates, all_layers(model, parts))
    return frozenset(map(model.is_local, rotated))


def has_linear(model: ModelConfig, parts: StageParts) -> bool:
    """Whether layers of a stage have linear attention or Mamba-2."""
    return any(map(model.is_linear, all_layers(model, parts)))


def tempers(model: ModelConfig, parts: StageParts) -> bool:
    """Whether layers of a stage multiply queries by factors of their positions."""
    return any(map(model.tempers, all_layers(model, parts)))


def layer_weights(model: ModelConfig, layer: int) -> Weights:
    """Name within the layer -> parameter, for every parameter of one transformer layer.

    All experts of a layer are one parameter, [E, out, in]. An index from `num_layers` on means a
    layer of an MTP module, here without the prediction's norms and projection.
    """
    kind = layer_kind(model, layer)._replace(predicts=False)
    return {weight.name: weight for weight in describe(model, kind).weights}


def stage_weights(model: ModelConfig, parts: StageParts | None = None) -> Weights:
    """Global name -> parameter, for every parameter that a stage (default: the model) owns.

    A tied output weight is listed only if the stage does not hold the input embedding. A stage that
    has MTP modules but not the embedding has a copy of it.
    """
    parts = parts or whole_model(model)
    found: dict[str, Weight] = {}
    if parts.embedding:
        found |= {weight.name: weight for weight in embedding_weights(model)}
    for layer in parts.layers:
        in_layer = layer_weights(model, layer)
        found |= {f"layers.{layer}.{name}": weight for name, weight in in_layer.items()}
    for depth in range(sets_of_predictions(model, parts)):
        around = describe_layer(model, model.num_layers).one(MTPInput)
        found |= {f"mtp.{depth}.{weight.name}": weight for weight in around.weights}
        for prefix, layer in prediction_prefixes(model, depth).items():
            in_layer = layer_weights(model, layer)
            found |= {f"{prefix}{name}": weight for name, weight in in_layer.items()}
    norm, output = _head(model)
    if has_final_norm(model, parts):
        found |= {weight.name: weight for weight in norm}
    for weight in output if parts.head else ():
        if canonical_name(model, weight.name) not in found:
            found[weight.name] = weight
    if _copies_embedding(model, parts):
        found["mtp_embed_tokens.weight"] = embedding_weights(model)[0]
    return found


def cut_rows(model: ModelConfig, part: int, tp: int, etp: int) -> dict[str, tuple[int, int]]:
    """Matrices whose rows tensor parallelism cuts within a part: (length, length on a rank).

    Args:
        model: the model.
        part: elements of a row that belong together, from its start.
        tp: ranks that split dense parameters.
        etp: ranks that split those of experts.
    """
    matrices = {n: w for n, w in stage_weights(model).items() if len(w.shape) > 1 and w.trained}
    lengths = {n: (w.shape[-1], w.local(tp, 1, etp)[-1]) for n, w in matrices.items()}
    return {
        n: (whole, here) for n, (whole, here) in lengths.items() if here < whole and here % part
    }


def parameter_shapes(model: ModelConfig, parts: StageParts | None = None) -> Shapes:
    """Global name -> global shape, for every parameter that a stage (default: the model) owns."""
    return {name: weight.shape for name, weight in stage_weights(model, parts).items()}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by place; a tied weight counts with the embedding if the stage holds both."""

    embedding: int
    layers: int
    head: int
    mtp: int

    @property
    def total(self) -> int:
        """Parameters of all places."""
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
        padded: whether to include vocabulary padding.
        active: count only as many experts as a token is sent to.
    """
    parts = parts or whole_model(model)
    shared = parts.embedding and not model.untie_embeddings_and_output_weights
    table = model.padded_vocab_size * model.hidden_size
    padding = 0 if padded else table - model.vocab_size * model.hidden_size
    embedding = sum(weight.size for weight in embedding_weights(model)) - padding
    if not parts.embedding:
        embedding = table - padding if _copies_embedding(model, parts) else 0
    further = all_layers(model, ModelParts(mtp=sets_of_predictions(model, parts)))
    norm, output = _head(model)
    head = sum(weight.size for weight in norm) if has_final_norm(model, parts) else 0
    if parts.head:
        bias = 0 if padded else (model.padded_vocab_size - model.vocab_size) * model.lm_head_bias
        own = (weight.size for weight in output if not (shared and weight.multiplies))
        head += sum(own) - bias - (0 if shared else padding)
    return ParameterCount(
        embedding=embedding,
        layers=_sizes(model, parts.layers, active),
        head=head,
        mtp=_sizes(model, further, active),
    )


def _sizes(model: ModelConfig, layers: Iterable[int], active: bool) -> int:
    """Parameters of layers; `active`: with only as many experts as a token uses."""
    kinds = kinds_of(model, layers).items()
    return sum(_size(model, kind, active) * count for kind, count in kinds)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        """Matrix multiplications plus attention."""
        return self.matmul + self.attention

    @property
    def dx(self) -> int:
        """The FLOPs of dX, if these are of a forward; dW takes those of matrix multiplications."""
        return self.matmul + 2 * self.attention


def forward_flops(
    model: ModelConfig,
    seq_length: int,
    parts: StageParts | None = None,
    *,
    causal: bool = True,
) -> Flops:
    """Forward FLOPs per token of a stage (default: the whole model).

    2 x weights of the linear layers (including router, chosen experts and output layer), plus per
    layer 2 x keys attended x heads x (key + value features of a head). The mean number of keys is
    half the sequence if causal, fewer with a window or chunks, or where an indexer chooses them,
    whose own scores are of all. With linear attention it is a number that does not depend on the
    sequence (`Recurrence.flops`). The output layer runs once per predicted token.
    """
    parts = parts or whole_model(model)
    weights, states, per_key = 0, 0, defaultdict[Reach, int](int)
    for kind, count in kinds_of(model, all_layers(model, parts)).items():
        weights += _size(model, kind, active=True, multiplied=True) * count
    for layer in all_layers(model, parts):
        described = describe_layer(model, layer)
        if described.kind.linear:
            states += described.one(Recurrence).flops
        elif described.kind.softmax:
            reach = model.reach_of(layer)
            if model.is_sparse:
                per_key[reach] += index_flops_per_key(model)
                reach = Reach(window=model.indexer.topk)
            per_key[reach] += described.one(CoreAttention).flops_per_key
    if parts.head:
        weights += (1 + model.mtp_num_layers) * model.padded_vocab_size * model.hidden_size
    scores = sum(
        count * (reach.mean_keys(seq_length) if causal else seq_length)
        for reach, count in per_key.items()
    )
    return Flops(2 * weights, states + int(scores))


@lru_cache(maxsize=1024)  # asked for each of thousands of layouts of the same model
def training_flops(
    model: ModelConfig,
    seq_length: int,
    parts: StageParts | None = None,
    *,
    causal: bool = True,
) -> Flops:
    """FLOPs per token of forward and backward: 6 x linear weights (4 x if they are frozen, or pass
    no gradient on), and attention three times, scores of an indexer once if it is not trained."""
    forward = forward_flops(model, seq_length, parts, causal=causal)
    fewer = forward.matmul - 2 * trained_weights(model, parts)
    attention = 3 * forward.attention
    if model.is_sparse:
        kinds = kinds_of(model, all_layers(model, parts or whole_model(model))).items()
        each = (weight for kind, n in kinds for weight in n * describe(model, kind).weights)
        fewer += 2 * sum(weight.size for weight in each if not weight.passes_on)
        if not model.trains_indexer:
            keys = Reach().mean_keys(seq_length) if causal else seq_length
            layers = len(all_layers(model, parts or whole_model(model)))
            attention -= 2 * layers * int(keys * index_flops_per_key(model))
    return Flops(matmul=3 * forward.matmul - fewer, attention=attention)


def trained_weights(model: ModelConfig, parts: StageParts | None) -> int:
    """Elements of the trained matrices that multiply a token; the output layer's count once per
    predicted token."""
    parts = parts or whole_model(model)
    kinds = kinds_of(model, all_layers(model, parts)).items()
    layers = sum(_size(model, kind, True, True, True) * count for kind, count in kinds)
    _, (output, *_) = _head(model)
    runs = (1 + model.mtp_num_layers) * (parts.head and output.trained)
    return layers + runs * output.size


@lru_cache(maxsize=1024)
def _size(
    model: ModelConfig,
    kind: LayerKind,
    active: bool = False,
    multiplied: bool = False,
    trained: bool = False,
) -> int:
    """Parameters of one layer.

    Args:
        model: the architecture.
        kind: kind of the layer.
        active: count only as many experts as a token is sent to.
        multiplied: count only matrices of linear layers, not norms and biases.
        trained: count only what is trained.
    """
    weights = [
        weight
        for weight in describe(model, kind).weights
        if (weight.multiplies or not multiplied) and (weight.trained or not trained)
    ]
    experts = sum(weight.size for weight in weights if weight.of_experts)
    chosen = experts * model.moe_router_topk // (model.num_experts or 1)
    return sum(weight.size for weight in weights) - experts + (chosen if active else experts)


def _head(model: ModelConfig) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """The final norm's weights, and the output layer's: its matrix, then its bias."""
    weights = head_weights(model)
    first = next(place for place, weight in enumerate(weights) if weight.multiplies)
    return weights[:first], weights[first:]


def _copies_embedding(model: ModelConfig, parts: StageParts) -> bool:
    """Whether a stage needs the embedding for multi-token prediction only."""
    tied_here = parts.head and not model.untie_embeddings_and_output_weights
    return parts.mtp > 0 and not parts.embedding and not tied_here
