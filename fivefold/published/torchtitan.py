"""A replay of torchtitan of December 2024: FSDP2, DTensor's tensor parallelism, pipelines.

Sources: torchtitan's parallelisms/parallelize_llama.py, models/llama/model.py, train.py and
metrics.py; PyTorch's _fsdp_collectives.py, pipelining/stage.py and tensor/parallel/loss.py. It
reports the allocator's peak of reserved memory, with expandable segments, of the fullest rank.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from math import inf, prod

from fivefold.counts.shards import held
from fivefold.layout import Layout
from fivefold.published.replay.step import Replay, weight_shapes
from fivefold.published.replay.tape import Op, again, saved_by
from fivefold.published.row import PublishedRow

_GATHER, _REDUCE = "all-gather", "reduce-scatter"
_ROOT = -1  # in the place of a layer: embedding, final norm and output layer are one unit


class Torchtitan(Replay):
    """A replay of the memory of one torchtitan step.

    The state is sharded in fp32. Units are gathered, and their gradients reduced, on separate
    streams. Under a pipeline, units stay gathered and gradients accumulate in fp32 until the last
    microbatch. Layers may be compiled; the final norm and the loss are not.

    One class because it is one sequence of allocations: every method extends the same tape in the
    order of the framework's code.
    """

    communicators = 4  # data, tensor, pipeline, context
    expandable = True
    compiles_loss = False

    def __init__(
        self,
        layout: Layout,
        pp_rank: int,
        capacity: float = inf,
        *,
        compiled: bool = True,
        selects: bool = False,
    ) -> None:
        """Prepare the replay of one pipeline rank.

        Args:
            layout: layout of the run.
            pp_rank: number of the pipeline rank.
            capacity: bytes of the device that the allocator may use.
            compiled: whether layers are compiled.
            selects: whether every second multiplication is recomputed, and everything that is
                neither a multiplication nor attention.
        """
        super().__init__(layout, pp_rank, capacity)
        if self._pipelined:  # each microbatch has separate buffers
            self.num_microbatches = layout.num_microbatches
        self.compiled = compiled
        self.selects = selects
        self._gathered: dict[tuple[int, int], list[Hashable]] = {}
        # Buffers of the last all-gather, kept until the next one has been copied.
        self._arrived: list[Hashable] = []
        # Buffers of the last reduce-scatter, kept until the next one starts.
        self._leaving: list[Hashable] = []
        self._grown: dict[tuple[int, int], list[Hashable]] = {}
        self._reduced: dict[tuple[int, int], Hashable] = {}
        self._backwards: Counter[int] = Counter()
        self._results: list[Hashable] = []

    @classmethod
    def of(cls, row: PublishedRow, layout: Layout, pp_rank: int, capacity: float) -> "Torchtitan":
        """The replay of a published run."""
        eager, selects = "eager" in row.text("note").split(), row.text("recomp") == "selective-op"
        return cls(layout, pp_rank, capacity, compiled=not eager, selects=selects)

    @cached_property
    def units(self) -> dict[tuple[int, int], list[tuple[int, ...]]]:
        """Shapes of the parameters that are gathered together, by (stage, place)."""
        found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        hidden = self.layout.config.model.hidden_size
        table = (int(self.vocabulary) // hidden, hidden)
        for stage, parts in self.stages.items():
            ends = [table] * parts.embedding + [(hidden,), table] * parts.head
            if ends:
                found[stage, _ROOT] = ends
            for place, layer in enumerate(parts.layers):
                found[stage, place] = list(weight_shapes(self.layout, layer).values())
        return found

    @property
    def kept(self) -> frozenset[str]:
        """Names of kept tensors; if `selects`, every second product from the first on, attention,
        and sums over the tensor-parallel ranks."""
        if not self.selects:
            return super().kept
        products = [op.out for op in self.layer if op.is_matmul]
        sums = ("o", "down") if self.layout.grid.tp > 1 else ()
        kept = frozenset({"x", "mixed", "statistics", *products[::2], *sums})
        if not self.compiled:
            return kept
        repeated = again(self.layer, kept)  # a compiler drops what the backward does not need
        return kept & (saved_by(self.layer) | {name for op in repeated for name in op.inputs})

    @cached_property
    def layer(self) -> Sequence[Op]:
        """Keys and values are repeated for every head; a gathered input serves all projections."""
        z, model, tp = self.sizes, self.layout.config.model, self.layout.grid.tp
        cp, training = self.layout.grid.cp, self.layout.config.training
        row = 2 * model.hidden_size / tp  # bytes of a weight's gradient, per feature of a head
        buffer = z.gathered if tp > 1 else 0.0
        # Gathers along the sequence go through a flat tensor; those in pieces, that run beside
        # multiplications, through memory which is not the allocator's.
        flat = 0.0 if self.layout.config.parallel.tp_comm_overlap else buffer
        rotating = (cp * z.query, cp * z.query) if cp > 1 else ()  # keys, values of all ranks
        unfused = () if self.compiled else (2 * z.query, 2 * z.query)
        first, second = ("all1", "all2") if tp > 1 else ("norm1", "norm2")
        repeats = z.key < z.query
        keys, values = ("keys", "values") if repeats else ("k_rotated", "v")

        def multiply(out: str, size: float, source: str, features: int, read: float) -> Op:
            sums = buffer if out in ("o", "down") else 0.0
            narrow = read if training.fp8_format else 0.0
            return _multiply(out, size, source, row * features, sums, narrow=narrow)

        return [
            *self._norm("norm1", "x"),
            *([Op("all1", z.gathered, ("norm1",), buffer=flat)] if tp > 1 else []),
            multiply("q", z.query, first, model.q_size, z.gathered),
            multiply("k", z.key, first, model.k_size, z.gathered),
            multiply("v", z.key, first, model.v_size, z.gathered),
            Op("q_rotated", z.query, ("q",), scratch=unfused, backward_scratch=unfused),
            Op("k_rotated", z.key, ("k",)),
            *([Op("keys", z.query, ("k_rotated",))] if repeats else []),
            *([Op("values", z.query, ("v",))] if repeats else []),
            Op("statistics", z.statistics, ()),
            Op(
                "mixed",
                z.query,
                ("q_rotated", keys, values),
                ("q_rotated", keys, values, "mixed", "statistics"),
                scratch=rotating,
                backward_scratch=(2 * z.query, *rotating),  # dQ in fp32
            ),
            multiply("o", z.hidden, "mixed", model.attention_size, z.query),
            Op("middle", z.hidden, ("x", "o"), passes=True),
            *self._norm("norm2", "middle"),
            *([Op("all2", z.gathered, ("norm2",), buffer=flat)] if tp > 1 else []),
            multiply("gate", z.inner, second, model.ffn_size, z.gathered),
            *([] if self.compiled else [Op("silu", z.inner, ("gate",), ("gate",))]),
            multiply("up", z.inner, second, model.ffn_size, z.gathered),
            self._product(),
            multiply("down", z.hidden, "product", model.ffn_size, z.inner),
            Op("y", z.hidden, ("middle", "down"), passes=True),
        ]

    @cached_property
    def loss(self) -> Sequence[Op]:
        """An fp32 copy of the logits, their log-softmax, and a gradient of each."""
        z = self.sizes
        split = self.layout.grid.tp > 1
        wide = 4 * z.entries
        logits = [
            *self._norm("norm", "x", compiled=False),
            *([Op("all", z.gathered, ("norm",), buffer=z.gathered)] if split else []),
            _multiply("logits", 2 * z.entries, "all" if split else "norm", 2 * self.vocabulary),
        ]
        if self.compiles_loss and self.compiled and not split:
            # One kernel, which reads logits and writes their gradient.
            return [*logits, Op("y", 4, ("logits",), ("logits",))]
        return [
            *logits,
            Op("wide", wide, ("logits",)),
            # Split over the vocabulary, shifted logits and their exponentials are tensors, too.
            Op(
                "softmax",
                wide,
                ("wide",),
                () if split else ("softmax",),
                scratch=(wide,) if split else (),
                passes=split,
            ),
            Op(
                "y",
                4,
                ("softmax",),
                ("softmax",),
                outlives=("wide", "logits"),
                backward_scratch=(wide, wide) if split else (),
            ),
        ]

    def build(self) -> None:
        """Shards of fp32 weights; under a pipeline also all that will arrive."""
        for unit, shapes in self.units.items():
            for number, shape in enumerate(shapes):
                self.memory.allocate(("weight", unit, number), 4 * held(shape, self.shards))
        if not self._pipelined:
            return
        for stage, parts in self.stages.items():
            ends = [not parts.embedding, not parts.head]
            for number in range(sum(ends) * self.num_microbatches):
                self.memory.allocate(("arriving", stage, number), self.sizes.hidden)

    def receive(self, stage: int, mb: int) -> None:
        """The root unit is gathered with the first stage's input; others arrive in a buffer."""
        self.gather(stage, _ROOT)
        here = self.stages[stage].embedding
        self.memory.allocate((stage, mb, 0), self.sizes.hidden if here else 1)

    def gather(self, stage: int, place: int) -> None:
        """A unit's weights, in bf16, unless they are there."""
        unit = (stage, place)
        if unit in self._gathered or unit not in self.units:
            return
        sizes = [2 * prod(s) for s in self.units[unit]]
        own, whole = sum(sizes) / self.shards, sum(sizes)
        arrived = [self.tape.make(size, _GATHER) for size in (own, whole)]
        self._gathered[unit] = [self.tape.make(size) for size in sizes]
        self.tape.free(self._arrived)
        self._arrived = arrived

    def after_forward(self, stage: int, place: int) -> None:
        """Free the weights, except for the last layer's, which the backward needs next."""
        if not self._pipelined and place < len(self.stages[stage].layers) - 1:
            self.tape.free(self._gathered.pop((stage, place), ()))

    def after_backward(self, stage: int, place: int, mb: int, weights: list[Hashable]) -> None:
        """Reduce gradients; in a pipeline, accumulate them in fp32 up to the last microbatch."""
        unit = (stage, place)
        if self._pipelined:
            self._grow(unit, weights)
        else:
            self.tape.free(self._gathered.pop(unit, ()))
            self._reduce(unit, weights)

    def end_backward(self, stage: int, mb: int, weights: list[Hashable]) -> None:
        """The root unit is the last one; under a pipeline the last microbatch reduces them all."""
        self.after_backward(stage, _ROOT, mb, weights)
        if not self._pipelined:
            return
        if self.stages[stage].head:
            self._results.append(self.tape.make(2 * self.sizes.entries))
        self._backwards[stage] += 1
        if self._backwards[stage] % self.num_microbatches == 0:
            for unit in [unit for unit in self.units if unit[0] == stage]:
                self.tape.free(self._gathered.pop(unit, ()))
                self._reduce(unit, self._grown.pop(unit, []))

    def update(self, *, is_first: bool) -> None:
        """Create the moments in the first step; allocate the root of each second moment briefly."""
        if self._results:  # the last stage joins the logits of all microbatches
            self.tape.free([self.tape.make(2 * self.sizes.entries * len(self._results))])
            self.tape.free(self._results)
            self._results = []
        self.tape.free(self._leaving)
        self._leaving = []
        shards = [
            (unit, number, 4 * held(shape, self.shards))
            for unit, shapes in self.units.items()
            for number, shape in enumerate(shapes)
        ]
        if is_first:
            for unit, number, size in shards:
                for moment in (1, 2):
                    self.memory.allocate(("moment", moment, unit, number), size)
        roots = [self.tape.make(size) for *_, size in shards]
        self.tape.free(roots)
        self.tape.free(self._reduced.values())
        self._reduced.clear()

    @property
    def _pipelined(self) -> bool:
        return self.layout.grid.pp > 1

    def _grow(self, unit: tuple[int, int], gradients: list[Hashable]) -> None:
        """Add gradients to those of earlier microbatches, in fp32."""
        if unit in self.units and unit not in self._grown:
            self._grown[unit] = [self.tape.make(4 * prod(shape)) for shape in self.units[unit]]
        self.tape.free(gradients)

    def _reduce(self, unit: tuple[int, int], gradients: Iterable[Hashable]) -> None:
        """Reduce one fp32 tensor to a shard, which is kept until the next step."""
        if unit not in self.units:
            return
        self.tape.free(self._leaving)
        whole = sum(map(prod, self.units[unit]))
        self._leaving = [self.tape.make(4 * whole)]
        self.tape.free(gradients)
        own = sum(held(shape, self.shards) for shape in self.units[unit])
        shard = self.tape.make(4 * own, _REDUCE)
        if self._reduced.setdefault(unit, shard) != shard:  # added to that of earlier microbatches
            self.memory.release(shard)

    def _norm(self, out: str, source: str, *, compiled: bool | None = None) -> list[Op]:
        """A compiled norm saves its input; else an fp32 copy and what is scaled by the weight."""
        size = self.sizes.hidden
        if self.compiled if compiled is None else compiled:
            return [Op(out, size, (source,), (source,))]
        wide, scaled = f"{out}_wide", f"{out}_scaled"
        return [
            Op(wide, 2 * size, (source,), (wide,)),
            Op(scaled, size, (wide,), (scaled,), scratch=(2 * size,), backward_scratch=(2 * size,)),
            Op(out, size, (scaled,)),
        ]

    def _product(self) -> Op:
        if self.compiled:
            return Op("product", self.sizes.inner, ("gate", "up"), ("gate", "up"))
        return Op("product", self.sizes.inner, ("silu", "up"), ("silu", "up"))


class TorchtitanCompiledLoss(Torchtitan):
    """A replay of torchtitan since April 2025, which compiles its loss (its commit bbb1b616e)."""

    compiles_loss = True


def _multiply(
    out: str, size: float, source: str, weight: float, buffer: float = 0.0, *, narrow: float = 0.0
) -> Op:
    """A linear layer; in fp8, of an input of `narrow` bytes, operands are cast for each product."""
    forward = (narrow / 2, weight / 2) if narrow else ()
    backward = (size / 2, size / 2, weight / 2, narrow / 2) if narrow else ()
    return Op(
        out,
        size,
        (source,),
        (source,),
        weight=weight,
        buffer=buffer,
        scratch=forward,
        backward_scratch=backward,
        is_matmul=True,
    )
