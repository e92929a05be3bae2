"""The operations of layers that keep a state (Gated DeltaNet, Kimi Delta Attention, Mamba-2, short
convolutions), and their costs."""

from dataclasses import dataclass, field
from functools import partial
from math import ceil

from fivefold.config.model import ModelConfig, StateShape
from fivefold.description.latent import LatentDown
from fivefold.description.operations import QKV, ColumnLinear, Kept, Operation, RowLinear
from fivefold.description.running import Running
from fivefold.description.weights import Weight, column, row, whole

CHUNK = 64
"""Most tokens of a chunk, within which the delta rule is solved at once."""
RERUN_BY = ("a2a_overlap_attn",)
"""Recomputed modules that rerun a mixer with a state."""


@dataclass(frozen=True, kw_only=True)
class Recurrence(Operation):
    """The convolution, and the states' inputs and outputs.

    Attributes:
        model: gives the heads and their features.
    """

    model: ModelConfig = field(repr=False)

    @property
    def sizes(self) -> StateShape:
        """Sizes of the heads."""
        return self.model.states

    @property
    def flops(self) -> int:
        """FLOPs of the forward of one token, as Megatron-LM counts them."""
        raise NotImplementedError

    @property
    def rates(self) -> int:
        """Numbers per token and head that set how fast states decay and learn."""
        raise NotImplementedError

    def working(self, running: Running) -> float:
        """Most bytes per token of its backward, which makes all again that lies between: in the
        walk through chunks, before it, or in the convolution."""
        raise NotImplementedError

    @property
    def read_features(self) -> int:
        """Features per token of what it reads, over all ranks: what is mixed, and rates."""
        return self.sizes.mixed + self.rates * self.sizes.heads

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Its inputs, from which the backward recomputes everything else."""
        features = self.sizes.mixed, self.rates * self.sizes.heads
        tensors = tuple(map(running.by_heads, features))
        return (Kept(self.name, tensors, RERUN_BY, "core_attn"),)


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Recurrence):
    """The convolution over queries, keys and values, and the gated delta rule."""

    @property
    def flops(self) -> int:
        """Four products of each value head's state with a key, a value or a query, and the taps of
        the convolution."""
        sizes = self.sizes
        return 2 * (4 * sizes.size * sizes.key + sizes.taps * sizes.mixed)

    @property
    def rates(self) -> int:
        """How fast a state learns, and how fast it decays."""
        return 2

    def working(self, running: Running) -> float:
        """See `Recurrence.working`.

        Numbers are tensors that are alive at once, as autograd keeps them, with their gradients:
        of the size of a key for each key head, of one for each value head, and so on.
        """
        sizes, tp = self.sizes, running.tensor_parallel
        keys, values = sizes.groups / tp, sizes.heads / tp
        of_keys, of_each, of_values = keys * sizes.key, values * sizes.key, values * sizes.value
        walk = 7 * of_keys + 7 * of_each + 8 * of_values + (5 * values + 2 * keys) * CHUNK
        before = 9 * of_keys + 4 * of_each + 8 * of_values + (7 * values + 2 * keys) * CHUNK
        taps = sizes.taps * (2 * of_keys + of_values)
        ends = 9 * of_keys + of_each + 8 * of_values, 14 * of_keys + of_each + 6 * of_values
        most = max(filled(running) * max(walk, before), *(taps + end for end in ends))
        return max(running.element_bytes, 4) * most


@dataclass(frozen=True, kw_only=True)
class KimiDeltaRule(DeltaRule):
    """The delta rule with a decay for each feature of a key."""

    @property
    def rates(self) -> int:
        """How fast a state learns, and how fast each of its features decays."""
        return 1 + self.sizes.key

    def working(self, running: Running) -> float:
        """See `Recurrence.working`: at the end of the walk's backward, within the products of its
        halves, or in the convolution."""
        sizes, heads = self.sizes, self.sizes.heads / running.tensor_parallel
        key, value = sizes.key, sizes.value
        walk = max(40 * key + 4 * value, 32 * key + 8 * value + 5 * CHUNK)
        taps = 14 * key + 3 * value + (sizes.taps + 2) * (2 * key + value)
        most = max(filled(running) * walk, taps)
        return max(running.element_bytes, 4) * heads * most


@dataclass(frozen=True, kw_only=True)
class GatedConvolution(Recurrence):
    """The convolution of features multiplied by gates, which take the place of rates."""

    @property
    def flops(self) -> int:
        """The taps of the convolution."""
        return 2 * self.sizes.taps * self.sizes.mixed

    @property
    def rates(self) -> int:
        """A gate for each feature."""
        return self.sizes.value

    def working(self, running: Running) -> float:
        """What is convolved and its gradient, what comes in, what of that counts, and a product."""
        return max(running.element_bytes, 4) * 5 * self.sizes.mixed / running.tensor_parallel


def filled(running: Running) -> float:
    """Places in chunks for each token of a sequence."""
    return ceil(running.seq_length / CHUNK) * CHUNK / running.seq_length


@dataclass(frozen=True, kw_only=True)
class GatedHeads(Operation):
    """Heads times their gates: normalised heads of linear attention, or attention's output.

    Attributes:
        features: features of all heads.
    """

    features: int

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Heads and gates."""
        return (Kept(self.name, (running.by_heads(self.features),) * 2, RERUN_BY),)


def projections(
    name: str,
    weights: tuple[Weight, ...],
    inputs: int,
    outputs: int,
    recomputed_by: tuple[str, ...],
) -> ColumnLinear:
    """The projections of all inputs of the states, and of the gates."""
    return ColumnLinear(
        name, weights, RERUN_BY, QKV, inputs=inputs, outputs=outputs, recomputed_by=recomputed_by
    )


def projection_back(size: int, hidden: int) -> RowLinear:
    """The projection of all heads of a layer with states."""
    weights = row("self_attn.out_proj", size, hidden, False)
    return RowLinear("attn_proj", weights, inputs=size, outputs=hidden, recomputed_by=RERUN_BY)


def short_convolution(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """A gated short convolution without the norm and the sum around it; see `linear_attention`."""
    h = model.hidden_size
    made = (
        *column("self_attn.in_proj_xc", h, 2 * h, False),
        *column("self_attn.in_proj_b", h, h, False),
    )
    taps = Weight("self_attn.conv1d.weight", (h, 1, model.states.taps), split=0)
    return (
        projections("linear_qkv", made, h, 3 * h, recomputed_by),
        GatedConvolution("short_convolution", (taps,), RERUN_BY, model=model),
        GatedHeads("output_gate", (), RERUN_BY, features=h),
        projection_back(h, h),
    )


def linear_attention(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """Linear attention without the norms and the sum around it.

    `recomputed_by`: recomputed modules that make its input again.
    """
    h, sizes, kimi = model.hidden_size, model.states, model.fades_features
    heads, size, mixed = sizes.heads, sizes.size, sizes.mixed
    of_heads = (
        Weight("self_attn.conv1d.weight", (mixed, 1, sizes.taps), split=0),
        Weight("self_attn.A_log", (heads,), split=0),
        Weight("self_attn.dt_bias", (heads * (sizes.key if kimi else 1),), split=0),
    )
    norm = Weight("self_attn.norm.weight", (sizes.value,), sees="heads")
    rule = KimiDeltaRule if kimi else DeltaRule
    return (
        *(_kimi_projections if kimi else _projections)(model, recomputed_by),
        rule("delta_rule", of_heads, RERUN_BY, model=model),
        GatedHeads("gated_norm", (norm,), RERUN_BY, features=size),
        projection_back(size, h),
    )


def _projections(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    h, sizes = model.hidden_size, model.states
    made, rates = sizes.mixed + sizes.size, 2 * sizes.heads
    weights = (
        *column("self_attn.in_proj_qkvz", h, made, False),
        *column("self_attn.in_proj_ba", h, rates, False),
    )
    return (projections("linear_qkv", weights, h, made + rates, recomputed_by),)


def _kimi_projections(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """The projections of queries, keys, values and rates; and those of decays and gates, in two
    steps."""
    h, sizes = model.hidden_size, model.states
    heads, low, decays = sizes.heads, sizes.value, sizes.heads * sizes.key
    weights = (
        *column("self_attn.in_proj_qkv", h, sizes.mixed, False),
        *column("self_attn.b_proj", h, heads, False),
    )
    down = (
        *whole("self_attn.f_a_proj", h, low, False),
        *whole("self_attn.g_a_proj", h, low, False),
    )
    up = partial(ColumnLinear, rerun_by=RERUN_BY, moved_by=QKV, inputs=low, recomputed_by=RERUN_BY)
    of_decays = column("self_attn.f_b_proj", low, decays, False)
    of_gates = column("self_attn.g_b_proj", low, sizes.size, False)
    return (
        projections("linear_qkv", weights, h, sizes.mixed + heads, recomputed_by),
        LatentDown(
            "gates_down",
            down,
            RERUN_BY,
            QKV,
            inputs=h,
            norms=0,
            recomputed_by=recomputed_by,
            shared_input=True,
        ),
        up("decays_up", of_decays, outputs=decays, kept_whole_by=()),
        up("gates_up", of_gates, outputs=sizes.size, kept_whole_by=()),
    )
