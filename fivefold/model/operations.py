"""The operations that transformer layers are made of, and what each costs; torch-free.

A layer's description (`model.description`) is a short list of these. Parameters, FLOPs, kept
activations, communication, times and memory are all derived from it. Sources of the kept bytes:
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), with
what fused attention, gated MLPs, experts, latents and 8-bit inputs change of it. A tensor that two
operations keep is counted once, with the first that keeps it.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from fivefold.config.model import ModelConfig
from fivefold.model.running import Running

LOG_SUM_EXP = 4  # bytes, fp32; fp64 keeps its own


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        name: name in the layer, or in the model.
        shape: global shape; of experts [experts, out, in].
        split: dimension that tensor-parallel ranks divide; None: each rank holds it whole.
        heads: heads in that dimension, none of which is divided: where the ranks do not divide
            their number, each rank holds all; 0: no heads.
        of_experts: whether the first dimension is divided over expert-parallel ranks, and the
            rest over expert-tensor-parallel ones.
        multiplies: whether a linear layer multiplies with it.
        sees: what a whole weight works on, which decides whether tensor-parallel ranks each have
            a part of its gradient: all "tokens", or part of the "heads".
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    heads: int = 0
    of_experts: bool = False
    multiplies: bool = False
    sees: Literal["tokens", "heads"] = "tokens"

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    def placed(self, tp: int) -> int | None:
        """The dimension that `tp` ranks divide."""
        return None if self.heads % tp else self.split

    def local(self, tp: int = 1, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
        """The shape that one rank holds, before data-parallel sharding."""
        shape, ranks = list(self.shape), etp if self.of_experts else tp
        if self.of_experts:
            shape[0] //= ep
        split = self.placed(tp)
        if split is not None:
            shape[split] //= ranks
        return tuple(shape)

    def is_partial(self, tp: int, *, sequence_parallel: bool) -> bool:
        """Whether each tensor-parallel rank computes a part of the gradient of the whole weight."""
        if self.of_experts or self.placed(tp) is not None:
            return False
        return self.sees == "heads" or self.split is not None or sequence_parallel


@dataclass(frozen=True)
class Kept:
    """What an operation keeps from its forward to its backward.

    Attributes:
        name: item of the breakdown of activations.
        tensors: bytes per token of each tensor.
        remade_by: recomputed modules (Megatron's names) that make it again instead.
        moved_by: offloaded module that moves it to host memory; empty: the item's own name.
    """

    name: str
    tensors: tuple[float, ...]
    remade_by: tuple[str, ...] = ()
    moved_by: str = ""

    @property
    def size(self) -> float:
        """Bytes per token."""
        return sum(self.tensors)

    @property
    def module(self) -> str:
        """The offloaded module that moves it."""
        return self.moved_by or self.name


@dataclass(frozen=True)
class Operation:
    """One operation of a layer; those that only pass tensors on keep and send nothing.

    Attributes:
        name: name in the breakdown of times.
        weights: parameters.
        rerun_by: recomputed modules (Megatron's names) that run it again in the backward.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    rerun_by: tuple[str, ...] = ()

    @property
    def multiplied(self) -> tuple[Weight, ...]:
        """The weights of linear layers."""
        return tuple(weight for weight in self.weights if weight.multiplies)

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """What it keeps for its backward, on one rank."""
        return ()

    def deferred(self, running: Running) -> float:
        """Bytes per token that its weight gradients need when they are computed later."""
        return 0.0

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """What tensor-parallel ranks send in the forward and in the backward: features of a token,
        of which each rank sends (t-1)/t for all tokens."""
        return 0, 0


@dataclass(frozen=True, kw_only=True)
class Norm(Operation):
    """A normalisation of features.

    Attributes:
        features: features of a token that are normalised on all ranks together.
        heads: (all query heads, all key heads), where each head is normalised by itself.
        shared_input: whether another item counts the input.
    """

    features: int
    heads: tuple[int, int] | None = None
    shared_input: bool = False

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Its input: the residual stream, or queries and keys."""
        if self.shared_input:
            return ()
        if self.heads is None:
            size = running.element_bytes * self.features / running.token_parts
            return (Kept(self.name, (size,)),)
        query, key = self.heads
        dim = self.features // (query + key)
        tensors = running.by_heads(query * dim), running.by_key_heads(key * dim, key)
        return (Kept(self.name, tensors),)


@dataclass(frozen=True, kw_only=True)
class Residual(Operation):
    """The sum with the residual stream, after a bias and dropout.

    Attributes:
        features: features of the residual stream.
        dropout: whether values are dropped before the sum.
        mask: item under which the mask of the dropout is kept.
    """

    features: int
    dropout: bool
    mask: str

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """A byte a value that may be dropped."""
        size = self.features / running.token_parts if self.dropout else 0.0
        return (Kept(self.mask, (size,)),)


@dataclass(frozen=True, kw_only=True)
class ColumnLinear(Operation):
    """Linear layers of the residual stream whose outputs tensor-parallel ranks divide.

    Attributes:
        inputs: features of a token.
        outputs: features of all results together.
        shared_input: whether another item counts the input.
        remade_by: recomputed modules that make the input again.
    """

    inputs: int
    outputs: int
    shared_input: bool = False
    remade_by: tuple[str, ...] = ()

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Its input, as the multiplication reads it."""
        if self.shared_input:
            return ()
        size = running.input_bytes * self.inputs / running.token_parts
        return (Kept(self.name, (size,), self.remade_by),)

    def deferred(self, running: Running) -> float:
        """Input and gradients of the outputs."""
        x = 0.0 if self.shared_input else running.input_bytes * self.inputs / running.token_parts
        return x + running.element_bytes * self.outputs / running.tensor_parallel

    def working(self, running: Running) -> float:
        """Bytes per token of gradients that are there when its weight gradient is computed.

        dY of the residual stream, those of its outputs, dX, and the input if it is gathered.
        """
        h = self.inputs
        around = h / running.token_parts + (2 * h if running.sequence_parallel else h)
        return running.element_bytes * (around + self.outputs / running.tensor_parallel)

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """The input is gathered, again for dW, and dX reduced; or dX is summed."""
        return (self.inputs if sequence_parallel else 0), 2 * self.inputs


@dataclass(frozen=True, kw_only=True)
class RowLinear(Operation):
    """A linear layer into the residual stream whose inputs tensor-parallel ranks divide.

    Attributes:
        inputs: features of a token on all ranks together.
        outputs: features of the result.
        remade_by: recomputed modules that make the input again.
    """

    inputs: int
    outputs: int
    remade_by: tuple[str, ...] = ()

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Its input, as the multiplication reads it."""
        size = running.input_bytes * self.inputs / running.tensor_parallel
        return (Kept(self.name, (size,), self.remade_by),)

    def deferred(self, running: Running) -> float:
        """Input and gradient of the output."""
        x = running.input_bytes * self.inputs / running.tensor_parallel
        return x + running.element_bytes * self.outputs

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """The result is reduced and dY gathered; or the result is summed."""
        return (self.outputs, self.outputs) if sequence_parallel else (2 * self.outputs, 0)


@dataclass(frozen=True, kw_only=True)
class CoreAttention(Operation):
    """Scores, softmax and the sum of values, of heads that tensor-parallel ranks divide.

    Attributes:
        model: heads and their features.
        from_latents: whether queries, keys and values can be made again from latents.
        sent_latent: features of a latent that context-parallel ranks gather instead of keys and
            values; 0: these.
    """

    model: ModelConfig = field(repr=False)
    from_latents: bool
    sent_latent: int

    @property
    def flops_per_key(self) -> int:
        """FLOPs of a token for each key that it attends to."""
        return 2 * (self.model.q_size + self.model.attention_size)

    def key_value_features(self, tp: int, *, gathered: bool) -> int:
        """Features of a token that context-parallel ranks send of keys and values.

        Args:
            tp: ranks that divide the heads.
            gathered: whether they are gathered, and not sent in turn or for other heads.
        """
        model = self.model
        heads = max(model.num_kv_heads // tp, 1)
        whole = heads * (model.query_dim + model.value_dim)
        return self.sent_latent if self.sent_latent and gathered else whole

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Queries, keys and values, or the latents of these; sums of exponentials, or scores and
        what dropout leaves."""
        model = self.model
        latent = running.element_bytes * self.sent_latent
        attended = (
            running.by_heads(model.q_size),
            running.by_key_heads(model.k_size, model.num_kv_heads),
            running.by_key_heads(model.v_size, model.num_kv_heads),
        )
        if running.gathers_latents:
            attended = attended[0], latent, 0.0
        remade = ("mla_up_proj",) if self.from_latents else ()
        scores = Kept("attn_scores", (self._scores(running),), ("core_attn",), "core_attn")
        return Kept("core_attn", attended, remade), scores

    def _scores(self, running: Running) -> float:
        model, element = self.model, running.element_bytes
        heads = model.num_attention_heads
        if running.fused_attention and not model.attention_dropout:
            narrower = running.input_bytes < element
            output = element * model.attention_size if narrower else 0.0
            return (max(LOG_SUM_EXP, element) * heads + output) / running.tensor_parallel
        per_score = element + (element + 1 if model.attention_dropout else 0)
        return per_score * heads * running.seq_length / running.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Activation(Operation):
    """The activation of an MLP's inner features, and its gate.

    Attributes:
        item: item under which its inputs are kept; empty: another item counts them.
        features: inner features on all ranks together.
        widths: tensors of so many features that it keeps; its output apart.
        copies: experts that each token is sent to, of which each has these features; 0: none.
        remade_by: recomputed modules that make its inputs again.
    """

    item: str = ""
    features: int
    widths: int
    copies: int = 0
    remade_by: tuple[str, ...] = ()

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Its inputs."""
        if not self.item:
            return ()
        size = running.element_bytes * self.widths
        if self.copies:
            size *= self.features / running.expert_tensor_parallel * running.rows(self.copies)
        else:
            size *= self.features / running.tensor_parallel
        return (Kept(self.item, (size,), self.remade_by),)


@dataclass(frozen=True, kw_only=True)
class PredictionInput(Operation):
    """What stands around a layer of multi-token prediction: three norms and a projection 2h -> h.

    Attributes:
        features: features of the hidden state.
    """

    features: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """The embedding, the input of the last norm, and that of the projection.

        The state before, which the first norm reads, counts with those that predict.
        """
        size = self.features / running.token_parts
        return (
            Kept("mtp_norms", (2 * running.element_bytes * size,)),
            Kept("mtp_proj", (2 * running.input_bytes * size,)),
        )

    def deferred(self, running: Running) -> float:
        """Input of the projection, and the gradient of its output."""
        outputs = running.element_bytes * self.features / running.tensor_parallel
        return 2 * running.input_bytes * self.features / running.token_parts + outputs

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """As of a column-parallel layer of two hidden states; without sequence parallelism its
        features are gathered besides."""
        return (2 if sequence_parallel else 1) * self.features, 4 * self.features
