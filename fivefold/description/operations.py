"""The operations that transformer layers are made of, and their costs.

A layer's description (`description.layers`) is a short list of these. Parameters, FLOPs, kept
activations, communication, times and memory are all derived from it. Kept bytes follow
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), extended
to fused attention, gated MLPs, experts, latents and 8-bit inputs. A tensor that two operations keep
is counted once, with the first.
"""

from dataclasses import dataclass, field

from fivefold.config.model import ModelConfig
from fivefold.description.running import Running, gradient_bytes, row_parts
from fivefold.description.weights import Weight

QKV = "qkv_linear"
"""Offloaded module: the projections that begin attention of any kind, or a layer with states."""
LOG_SUM_EXP = 4  # bytes per value, fp32; with fp64 as the compute dtype it takes 8


@dataclass(frozen=True)
class Kept:
    """One item that an operation keeps from its forward to its backward.

    Attributes:
        name: name of the item in the breakdown of activations.
        tensors: size of each tensor, bytes per token.
        recomputed_by: recomputed modules (Megatron's names) that recompute it instead.
        moved_by: offloaded module that moves it to host memory; empty: the item's own name.
        stays: whether it is kept even if the whole layer is recomputed.
        held_by: item that counts it unless it is offloaded; offloaded alone, it is on both sides.
        scaled: features of each input of a linear layer that it is an 8-bit copy of.
        groups: rows in a microbatch of each part of these inputs that has scales of its own; empty:
            all rows, one for each token.
    """

    name: str
    tensors: tuple[float, ...]
    recomputed_by: tuple[str, ...] = ()
    moved_by: str = ""
    stays: bool = False
    held_by: str = ""
    scaled: tuple[float, ...] = ()
    groups: tuple[float, ...] = ()

    @property
    def size(self) -> float:
        """Bytes per token."""
        return sum(self.tensors)

    @property
    def module(self) -> str:
        """The offloaded module that moves it to host memory."""
        return self.moved_by or self.name


@dataclass(frozen=True)
class Operation:
    """One operation of a layer. By default it keeps and sends nothing.

    Attributes:
        name: name in the breakdown of times.
        weights: its parameters.
        rerun_by: recomputed modules (Megatron's names) that rerun it in the backward.
        moved_by: offloaded module that moves inputs of its linear layers; empty: that of its name.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    rerun_by: tuple[str, ...] = ()
    moved_by: str = ""

    @property
    def frozen(self) -> bool:
        """Whether it has weights and none is trained, so that it computes no weight gradients."""
        return bool(self.weights) and not any(weight.trained for weight in self.weights)

    @property
    def wide(self) -> bool:
        """Whether its weights are multiplied in bf16 where others are in 8 bits."""
        return any(weight.wide for weight in self.weights)

    @property
    def multiplied(self) -> tuple[Weight, ...]:
        """Its weights that are matrices of linear layers."""
        return tuple(weight for weight in self.weights if weight.multiplies)

    def moved(self, running: Running) -> str:
        """`moved_by`, unless what would be moved is held to make queries, keys and values again."""
        held = "mla_up_proj" in self.rerun_by and "mla_up_proj" in running.recomputed
        return "" if held else self.moved_by

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """What it keeps for its backward on one rank."""
        read = self.kept_inputs(running) if self.keeps_inputs(running) else ()
        return *read, *self.kept_else(running)

    def keeps_inputs(self, running: Running) -> bool:
        """Whether inputs are kept: for gradients of its weights, or to recompute its results."""
        return not self.frozen or not {*self.rerun_by}.isdisjoint(running.recomputed)

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """What it keeps only if it has weights to train: inputs of linear layers."""
        return ()

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """All else that it keeps."""
        return ()

    def deferred(self, running: Running) -> float:
        """Bytes per token kept for its weight gradients when these are deferred."""
        return 0.0

    def gathered_narrow(self, running: Running) -> float:
        """Features per token that sequence-parallel ranks gather again as narrower copies."""
        return 0.0

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """Features per token that tensor-parallel ranks exchange in (forward, backward).

        Each of t ranks sends (t-1)/t of them, for all tokens.
        """
        return 0, 0


@dataclass(frozen=True, kw_only=True)
class Norm(Operation):
    """A normalisation.

    Attributes:
        features: normalised features of a token, over all ranks.
        heads: (query heads, key heads) of the model, if queries and keys are normalised.
        together: whether all query heads of a token are, and all key heads, not each by itself.
        shared_input: whether another item already counts the input.
        recomputed_by: recomputed modules that recompute the input.
        inside: whether the modules that rerun it make its statistics again, too.
    """

    features: int
    heads: tuple[int, int] | None = None
    together: bool = False
    shared_input: bool = False
    recomputed_by: tuple[str, ...] = ()
    inside: bool = False

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Its input: the residual stream, or queries and keys."""
        if self.shared_input:
            return ()
        if self.heads is None:
            size = running.element_bytes * self.features / running.token_parts
            return (Kept(self.name, (size,), self.recomputed_by),)
        query, key = self.heads
        dim = self.features // (query + key)
        tensors = running.by_heads(query * dim), running.by_key_heads(key * dim, key)
        return (Kept(self.name, tensors, ("a2a_overlap_attn",)),)


@dataclass(frozen=True, kw_only=True)
class Residual(Operation):
    """The sum with the residual stream, after bias and dropout.

    Attributes:
        features: features of the residual stream.
        dropout: whether dropout precedes the sum.
        mask: item under which the dropout mask is kept.
        scaled: whether a number of the layer multiplies the sum.
    """

    features: int
    dropout: bool
    mask: str
    scaled: bool = False

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """The mask, where it is kept."""
        size = running.mask_bytes * self.features / running.token_parts if self.dropout else 0.0
        return (Kept(self.mask, (size,)),)


@dataclass(frozen=True, kw_only=True)
class ColumnLinear(Operation):
    """Column-parallel linear layers of the residual stream: ranks split their outputs.

    Attributes:
        inputs: features of a token.
        outputs: output features of all its linears, over all ranks.
        shared_input: whether another item already counts the input.
        recomputed_by: recomputed modules that recompute the input.
        kept_whole_by: recomputed modules that keep or recompute the input itself, not a narrower
            copy.
    """

    inputs: int
    outputs: int
    shared_input: bool = False
    recomputed_by: tuple[str, ...] = ()
    kept_whole_by: tuple[str, ...] = ("layernorm",)

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """Its input, in the dtype of the matrix multiplication."""
        if self.shared_input:
            return ()
        size = running.input_size(*self.kept_whole_by) * self.inputs / running.token_parts
        scaled = (self.inputs,) if running.narrows(*self.kept_whole_by) else ()
        return (Kept(self.name, (size,), self.recomputed_by, self.moved(running), scaled=scaled),)

    def gathered_narrow(self, running: Running) -> float:
        """See `Operation.gathered_narrow`."""
        return self.inputs if running.narrows("layernorm") else 0.0

    def deferred(self, running: Running) -> float:
        """The input, and the gradients of the outputs."""
        x = 0.0 if self.shared_input else running.input_bytes * self.inputs / running.token_parts
        return x + gradient_bytes(running) * self.outputs / running.tensor_parallel

    def working(self, running: Running) -> float:
        """Bytes per token of gradients alive while its weight gradient is computed.

        These are the gradient of the residual stream, those of its outputs and of its input, and
        the gathered input with sequence parallelism.
        """
        h = self.inputs
        around = h / running.token_parts + (2 * h if running.sequence_parallel else h)
        return running.element_bytes * (around + self.outputs / running.tensor_parallel)

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """Sequence-parallel: gather x, again for dW, reduce-scatter dX; else all-reduce dX."""
        if sequence_parallel:
            return self.inputs, (1 if self.frozen else 2) * self.inputs
        return 0, 2 * self.inputs


@dataclass(frozen=True, kw_only=True)
class RowLinear(Operation):
    """A row-parallel linear layer into the residual stream: ranks split its inputs.

    Attributes:
        inputs: input features of a token, over all ranks.
        outputs: output features.
        recomputed_by: recomputed modules that recompute the input.
    """

    inputs: int
    outputs: int
    recomputed_by: tuple[str, ...] = ()

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """Its input, in the dtype of the matrix multiplication."""
        features = self.inputs / running.tensor_parallel
        size, scaled = running.input_bytes * features, (features,) if running.narrows() else ()
        return (Kept(self.name, (size,), self.recomputed_by, scaled=scaled),)

    def deferred(self, running: Running) -> float:
        """The input, and the gradient of the output."""
        x = running.input_bytes * self.inputs / running.tensor_parallel
        return x + gradient_bytes(running) * self.outputs

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """Sequence-parallel: reduce-scatter y, gather dY; else all-reduce y."""
        return (self.outputs, self.outputs) if sequence_parallel else (2 * self.outputs, 0)


@dataclass(frozen=True, kw_only=True)
class CoreAttention(Operation):
    """Scores, softmax and the weighted sum of values, for heads that tensor-parallel ranks split.

    Attributes:
        model: gives the heads and their features.
        from_latents: whether queries, keys and values can be recomputed from latents.
        sent_latent: features of the latent that context-parallel ranks gather instead of keys and
            values; 0: they gather keys and values.
        shares_output: whether the output projection keeps the output, too, as its input.
    """

    model: ModelConfig = field(repr=False)
    from_latents: bool
    sent_latent: int
    shares_output: bool = True

    @property
    def flops_per_key(self) -> int:
        """FLOPs of one query token per key it attends to."""
        return 2 * (self.model.q_size + self.model.attention_size)

    def key_value_features(self, tp: int, *, gathered: bool = False) -> int:
        """Features per token of the keys and values that context-parallel ranks exchange.

        Args:
            tp: ranks that split the heads.
            gathered: whether they are all-gathered, rather than passed on in a ring or exchanged by
                all-to-all.
        """
        model = self.model
        whole = model.kv_heads_of(tp) * (model.query_dim + model.value_dim)
        return self.sent_latent if self.sent_latent and gathered else whole

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Queries, keys and values or their latents, more heads of these for ranks that have fewer,
        and what a norm keeps of them beside; softmax statistics or unfused scores; output.

        The output is also the input of the output projection, or of its gate.
        """
        model = self.model
        latent = running.element_bytes * self.sent_latent
        attended = (
            running.by_heads(model.q_size),
            running.by_key_heads(model.k_size, model.num_kv_heads),
            running.by_key_heads(model.v_size, model.num_kv_heads),
        )
        if running.keeps_latents:
            attended = attended[0], latent, 0.0
        recomputed = ("a2a_overlap_attn", *(["mla_up_proj"] if self.from_latents else ()))
        again = ("core_attn", "a2a_overlap_attn")
        scores = Kept("attn_scores", (self._scores(running),), again, "core_attn")
        apart = self._keeps_output(running) or not running.fused_attention
        gated = model.attention_output_gate
        result = Kept(
            "attn_output",
            (0.0 if apart else running.by_heads(model.attention_size),),
            again,
            "core_attn",
            held_by="attn_gate" if gated else "attn_proj" if self.shares_output else "",
        )
        repeats = max(running.exchanging_ranks / model.kv_heads_of(running.tensor_parallel), 1) - 1
        repeated = Kept(
            "repeated_heads", tuple(repeats * each for each in attended[1:]), again, "core_attn"
        )
        twice = "".join(running.normed_twice[:1])
        normed = tuple(size for name, size in zip("qkv", attended, strict=True) if name in twice)
        beside = Kept("normed_heads", normed, again)
        return Kept("core_attn", attended, recomputed), repeated, beside, scores, result

    def working(self, running: Running) -> float:
        """Bytes per token of the gradients of its result and of queries, keys and values, and of
        copies with as many features as queries; and where keys and values, or latents of them, come
        from other ranks, of what is summed in fp32 at least."""
        model = self.model
        q, kv = model.q_size, model.k_size + model.v_size
        queries, keys = float(q), float(kv)
        if model.value_dim < model.query_dim and not running.others:
            queries += 2 * q  # the result and its gradient
            keys += 2 * model.k_size - model.v_size
        wide = max(running.element_bytes, 4) / running.element_bytes
        parts, exchanging = row_parts(running), running.exchanging_ranks
        if running.keeps_latents:  # half of the queries at a time, keys and values of all tokens
            queries, keys = queries / 2 + wide * q, parts * (keys + (1 + wide) * kv)
        elif parts > exchanging:  # half of the tokens at a time; a ring passes sums on
            longer = parts > 2 * exchanging
            passing = 1 + 3 * wide + 2 * longer
            queries, keys = queries / 2 + wide * q, keys * (1 + longer) / 2 + passing * kv
        queries += model.attention_size
        return running.by_heads(queries) + running.by_key_heads(keys, model.num_kv_heads)

    def _keeps_output(self, running: Running) -> bool:
        """Whether attention keeps its output in addition to its reader's copy: because ranks
        exchange it, or the output projection keeps 8 bits of it."""
        narrow = running.input_bytes < running.element_bytes
        return running.exchanging_ranks > 1 or (narrow and not self.model.attention_output_gate)

    def _scores(self, running: Running) -> float:
        model, element = self.model, running.element_bytes
        heads = model.num_attention_heads
        if running.fused_attention:
            output = element * model.attention_size if self._keeps_output(running) else 0.0
            return (max(LOG_SUM_EXP, element) * heads + output) / running.tensor_parallel
        per_score = element
        if model.attention_dropout:
            per_score += element + running.mask_bytes
        return per_score * heads * running.seq_length / running.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Activation(Operation):
    """The activation of an MLP's inner features, with its gate.

    Attributes:
        item: item under which its inputs are kept; empty: another item counts them.
        features: inner features over all ranks; with experts, of one expert.
        widths: number of tensors of that width it reads, which it keeps.
        copies: experts per token; 0: no experts.
        recomputed_by: recomputed modules that recompute its inputs.
    """

    item: str = ""
    features: int
    widths: int
    copies: int = 0
    recomputed_by: tuple[str, ...] = ()

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Its inputs."""
        sizes = (self._size(running),) * self.widths
        return (Kept(self.item, sizes, self.recomputed_by),) if self.item else ()

    def working(self, running: Running) -> float:
        """Bytes per token of the gradients of its result and of its inputs."""
        return (1 + self.widths) * self._size(running)

    def _size(self, running: Running) -> float:
        if self.copies:
            rows = running.rows(self.copies) / running.expert_tensor_parallel
            return running.element_bytes * self.features * rows
        return running.element_bytes * self.features / running.tensor_parallel
