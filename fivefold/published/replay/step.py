"""Replays steps of a pipeline rank on an allocator: the parts common to all frameworks.

The first step differs from the others, because the optimizer's moments are created at its end, in
memory that activations have freed. So two steps are run.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from fivefold.counts.shards import num_shards
from fivefold.description.shape import layer_weights
from fivefold.layout import Layout
from fivefold.pipeline.ir import Kind
from fivefold.published.replay.allocator import Allocator
from fivefold.published.replay.tape import Op, Tape, saved_by
from fivefold.published.row import PublishedRow

_STEPS = 2
_SCALAR = 512.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of common tensors of one microbatch on one rank, in bytes of bf16 unless noted.

    Attributes:
        tokens: number of tokens of a microbatch, before sequence parallelism splits them.
        hidden: hidden states in the residual stream.
        gathered: hidden states of all tokens.
        query, key: queries, and keys, of the rank's heads.
        inner: inner features of the MLP.
        statistics: statistics of attention's rows, in fp32.
        entries: number of elements of the rank's logits.
    """

    tokens: float
    hidden: float
    gathered: float
    query: float
    key: float
    inner: float
    statistics: float
    entries: float

    @classmethod
    def of(cls, layout: Layout) -> "Sizes":
        """The sizes in a layout."""
        config, grid = layout.config, layout.grid
        model, tokens, split = config.model, config.rank_tokens, config.parallel.token_parts
        return cls(
            tokens=tokens,
            hidden=2 * tokens * model.hidden_size / split,
            gathered=2 * tokens * model.hidden_size,
            query=2 * tokens * model.q_size / grid.tp,
            key=2 * tokens * model.k_size / min(grid.tp, model.num_kv_heads),
            inner=2 * tokens * model.ffn_size / grid.tp,
            statistics=4 * tokens * model.num_attention_heads / grid.tp,
            entries=tokens * model.padded_vocab_size / grid.tp,
        )


class Replay(ABC):
    """A replay of a framework's steps on one pipeline rank; subclasses define its details.

    The hidden states before layer `place` of a stage are named (stage, microbatch, place).
    """

    communicators = 0  # of NCCL
    reports_first = False  # reports the first rank's memory, not the fullest one's
    expandable = False  # segments
    lead = 0  # collectives in flight, see `Tape`

    def __init__(self, layout: Layout, pp_rank: int, capacity: float = inf) -> None:
        self.layout = layout
        self.pp_rank = pp_rank
        self.stages = {s: layout.split.stages[s] for s in layout.split.stages_of(pp_rank)}
        self.sizes = Sizes.of(layout)
        self.shards = num_shards(layout)
        self.memory = Allocator(self.expandable, capacity)
        self.tape = Tape(self.memory, self.lead)
        self.num_microbatches = min(layout.num_microbatches, 2 * layout.grid.pp)

    @classmethod
    def of(cls, row: PublishedRow, layout: Layout, pp_rank: int, capacity: float) -> "Replay":
        """The replay of a published run."""
        return cls(layout, pp_rank, capacity)

    def run(self) -> Allocator:
        """Run two steps on the allocator, and return it."""
        for _ in self._acts():
            pass
        return self.memory

    def fits(self) -> bool:
        """Whether the device has enough for two steps, which are run no further than it has."""
        return not any(self.memory.overflowed for _ in self._acts())

    def _acts(self) -> Iterator[None]:
        self.build()
        program = self.layout.order(self.num_microbatches).program()
        for step in range(_STEPS):
            for act in program.ranks[self.pp_rank]:
                if act.kind is Kind.F:
                    self.forward(act.stage, act.mb)
                elif act.kind is Kind.BW:
                    self.backward(act.stage, act.mb)
                yield
            self.tape.catch_up()
            self.update(is_first=step == 0)
            yield

    def forward(self, stage: int, mb: int) -> None:
        """Run the forward of a stage for a microbatch."""
        parts = self.stages[stage]
        last = len(parts.layers)
        self.receive(stage, mb)
        for place in range(last):
            self.gather(stage, place)
            self.tape.forward(
                (stage, mb, place, "layer"), self.layer, self.kept, _ends(stage, mb, place)
            )
            self.after_forward(stage, place)
        if parts.head:
            kept = saved_by(self.loss)
            self.tape.forward((stage, mb, last, "loss"), self.loss, kept, _ends(stage, mb, last))

    def backward(self, stage: int, mb: int) -> None:
        """Run the backward of a stage for a microbatch."""
        parts = self.stages[stage]
        last = len(parts.layers)
        sizes = {"x": self.sizes.hidden}
        result = (stage, mb, last + parts.head)
        self.tape.seed(result, _SCALAR)  # what arrives has its own memory
        if not parts.head or "y" not in saved_by(self.loss):
            self.memory.release(result)
        weights: list[Hashable] = []
        if parts.head:
            kept = saved_by(self.loss)
            weights = self.tape.backward(
                (stage, mb, last, "loss"), self.loss, kept, _ends(stage, mb, last), sizes
            )
        for place in reversed(range(last)):
            self.gather(stage, place)
            found = self.tape.backward(
                (stage, mb, place, "layer"), self.layer, self.kept, _ends(stage, mb, place), sizes
            )
            self.after_backward(stage, place, mb, found)
        if parts.embedding:
            weights.append(self.tape.make(2.0 * self.vocabulary))
        self.tape.drop_gradient((stage, mb, 0))
        self.end_backward(stage, mb, weights)

    def receive(self, stage: int, mb: int) -> None:
        """Called when the input of a stage has arrived."""
        self.memory.allocate((stage, mb, 0), self.sizes.hidden)

    @property
    def vocabulary(self) -> float:
        """Number of elements of an embedding."""
        model = self.layout.config.model
        return model.padded_vocab_size / self.layout.grid.tp * model.hidden_size

    @property
    def kept(self) -> frozenset[str]:
        """Names of the tensors that a layer keeps for its backward."""
        full = self.layout.config.memory.recompute_granularity == "full"
        return frozenset({"x"}) if full else saved_by(self.layer)

    @property
    @abstractmethod
    def layer(self) -> Sequence[Op]:
        """The operations of a layer, from "x" to "y"."""

    @property
    @abstractmethod
    def loss(self) -> Sequence[Op]:
        """The operations from the last layer's result, "x", to the loss, "y"."""

    @abstractmethod
    def build(self) -> None:
        """Allocate the model, and everything else that exists before the first step."""

    def gather(self, stage: int, place: int) -> None:  # noqa: B027 - not all frameworks do
        """Called when a layer's weights are needed."""

    def after_forward(self, stage: int, place: int) -> None:  # noqa: B027
        """Called after a layer's forward."""

    @abstractmethod
    def after_backward(self, stage: int, place: int, mb: int, weights: list[Hashable]) -> None:
        """Called after a layer's backward, which has computed these weight gradients."""

    @abstractmethod
    def end_backward(self, stage: int, mb: int, weights: list[Hashable]) -> None:
        """Called after a stage's backward, with the gradients of embedding and head."""

    @abstractmethod
    def update(self, *, is_first: bool) -> None:
        """Run the optimizer step."""


def _ends(stage: int, mb: int, place: int) -> dict[str, Hashable]:
    return {"x": (stage, mb, place), "y": (stage, mb, place + 1)}


def weight_shapes(layout: Layout, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters on one rank, before data-parallel sharding."""
    weights = layer_weights(layout.config.model, layer)
    return {name: weight.local(layout.grid.tp) for name, weight in weights.items()}
