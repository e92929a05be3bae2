"""The operations that transformer layers are made of, and their costs.

A layer's description (`description.layers`) is a short list of these. Parameters, FLOPs, kept
activations, communication, times and memory are all derived from it. Kept bytes follow
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), extended
to fused attention, gated MLPs, experts, latents and 8-bit inputs. A tensor that two operations keep
is counted once, with the first.
"""

from dataclasses import dataclass

from fivefold.description.running import Running, gradient_bytes
from fivefold.description.weights import Weight

QKV = "qkv_linear"
"""Offloaded module: the projections that begin attention of any kind, or a layer with states."""


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
