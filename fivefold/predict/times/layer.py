"""Predicts the times of whole layers on one rank for one microbatch, split by cause.

The time of a layer is the sum of its operations, plus recomputation, plus the time that the GPU
waits for the host and for offloaded activations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from math import ceil
from types import MappingProxyType

from fivefold.config.model import ModelConfig
from fivefold.description.activations import saved_activations, total
from fivefold.description.experts import Dispatch, ExpertsIn, ExpertsOut
from fivefold.description.kinds import LayerKind, layer_kinds
from fivefold.description.layers import describe
from fivefold.description.linear_attention import CHUNK
from fivefold.description.operations import Activation, Operation
from fivefold.description.running import Running
from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Dispatcher, Module, Software
from fivefold.predict.times.communication import all_reduce, gather
from fivefold.predict.times.compute import Phases, elementwise
from fivefold.predict.times.linears import ELEMENT
from fivefold.predict.times.operations import OperationTimes
from fivefold.predict.times.stage import Again, Times, added, repeated

TimesCache = dict[tuple[object, ...], dict[str, Times]]
"""Times of layers and operations, by the kinds and degrees that they depend on."""

DENSE_OPERATIONS = 25
"""Operations of a dense layer's forward whose elementwise kernels are fused."""
GROUPED_OPERATIONS = 49
"""Operations that experts add to it if their products are grouped. Counted on an H100 (2026-11-27):
a layer of Mixtral launches 85 kernels and one of DeepSeek-V2-Lite 110, where a dense one has 33."""
MIXER_SHARE = 0.6
"""Share of these that are of attention, with its norm and its sum."""
STATE_OPERATIONS, STEP_OPERATIONS, SPACE_STEP_OPERATIONS = 70, 8, 2
"""Operations of PyTorch's states in each layer, and for each chunk of its sequences: of a delta
rule, and of a state space."""
HALVING_OPERATIONS = 75
"""Further ones in each layer whose states forget features one by one."""
_ROUTER_OPERATIONS = 25
_PREPARATION: Mapping[Dispatcher, int] = MappingProxyType(
    {"alltoall": 11, "deepep": 1, "hybridep": 0}
)
_EXCHANGE: Mapping[Dispatcher, int] = MappingProxyType(
    {"alltoall": 15, "deepep": 12, "hybridep": 8}
)
"""Operations of megatron-core 0.16.1 for a layer whose experts are products of their own each: its
router, what prepares the exchange of tokens, and the exchange to experts and back. Those of the
router and of the all-to-all were counted (`benchmarks/megatron_operations.py`, 2026-11-29), with
four copies to the host; those of DeepEP and HybridEP are in its `token_dispatcher.py`."""


def forward_operations(layout: Layout, kind: LayerKind, software: Software) -> int:
    """Number of operations that the host issues for a layer's forward; a backward has twice as
    many.

    `fivefold audit` shows them beside those that it has counted.
    """
    operations = DENSE_OPERATIONS if software.fused else 45
    if kind.mixer is not None:
        operations = ceil(operations * (MIXER_SHARE if kind.attends else 1 - MIXER_SHARE))
    if kind.linear and not software.state_kernels:  # PyTorch computes it chunk by chunk
        chunks = ceil(layout.config.training.seq_length / CHUNK)
        each = STEP_OPERATIONS if kind.mixer is None else SPACE_STEP_OPERATIONS
        operations += STATE_OPERATIONS + each * chunks
        operations += HALVING_OPERATIONS * layout.config.model.fades_features
    mixer: Module = "mamba" if kind.mixer == "M" else "attn"
    if not kind.experts:
        alone = kind.mixer is not None and kind.attends
        return 1 if alone and mixer in software.graphed else operations
    if not software.loops_experts:
        return operations + GROUPED_OPERATIONS
    modules: dict[Module, int] = {
        mixer: operations,
        "moe_router": _ROUTER_OPERATIONS,
        "moe_preprocess": _PREPARATION[software.dispatcher],
    }
    launched = sum(number for each, number in modules.items() if each not in software.graphed)
    local = (layout.config.model.num_experts or 0) // layout.grid.ep
    narrow = layout.config.narrow_products and not kind.wide
    experts = local * (8 if narrow else 4)
    return launched + bool(software.graphed) + _EXCHANGE[software.dispatcher] + experts


@lru_cache(maxsize=512)
def _divided(model: ModelConfig, kind: LayerKind) -> tuple[tuple[Operation, ...], ...]:
    """A layer's operations on the tokens of a rank, and those on the rows of its experts."""

    def on_rows(op: Operation) -> bool:
        experts = isinstance(op, Dispatch | ExpertsIn | ExpertsOut)
        return experts or (isinstance(op, Activation) and op.copies > 0)

    operations = describe(model, kind).operations
    return tuple(op for op in operations if not on_rows(op)), tuple(filter(on_rows, operations))


def dw_operations(layout: Layout, kind: LayerKind, software: Software) -> int:
    """Number of operations for a layer's dW: one product per trained matrix."""
    model, each = layout.config.model, 1
    if software.loops_experts:
        each = (model.num_experts or 0) // layout.grid.ep
    dense, experts = _matrices(model, kind)
    return dense + each * experts


@lru_cache(maxsize=512)
def _matrices(model: ModelConfig, kind: LayerKind) -> tuple[int, int]:
    """Number of trained matrices that a layer multiplies with: without experts, and of experts."""
    of = [w.of_experts for w in describe(model, kind).weights if w.multiplies and w.trained]
    return of.count(False), of.count(True)


class LayerTimes(OperationTimes):
    """The times of a layout's layers, embedding and head on a cluster; each is computed once.

    Args:
        layout: the layout.
        cluster: the hardware.
        software: the framework's kernels and habits.
        known: times that layouts of the same model and cluster share; new times are added to it.
    """

    def __init__(
        self,
        layout: Layout,
        cluster: Cluster,
        software: Software,
        known: TimesCache | None = None,
    ) -> None:
        super().__init__(layout, cluster, software)
        self._known: dict[tuple[LayerKind, Again], Times] = {}
        self._times_cache = {} if known is None else known

    def layer(self, kind: LayerKind, again: Again) -> Times:
        """The times of a layer whose backward recomputes `again`."""
        if (kind, again) not in self._known:
            key = ("layer", again, *(settings for settings, _ in self._blocks(kind)))
            whole = self._once(key, lambda: {"layer": self._with_again(kind, again)})["layer"]
            self._known[kind, again] = self._copied(self._issued(whole, kind, again), kind, again)
        return self._known[kind, again]

    @cached_property
    def _running(self) -> Running:
        return Running.of(self.config)

    def _with_again(self, kind: LayerKind, modules: Again) -> Times:
        """The times of a layer with these of its modules recomputed; None: all."""
        plain, whole = self._sum(kind, "all", lambda op: True), Times()
        if modules != () and self.memory.tiled_mlp_num_shards > 1:
            whole = self._sum(kind, "tiled", lambda op: self._running.tiles(op.rerun_by))
            # The dW of recomputed tiles is never deferred.
            plain += Times(compute=Phases(0.0, whole.compute.dw, -whole.compute.dw))
        if modules is None:
            return plain + repeated(plain) + repeated(whole)
        if modules and self.software.keeps_every_second:
            return plain + repeated(self.every_second())
        chosen = set(modules)
        again = self._sum(kind, modules, lambda op: not chosen.isdisjoint(op.rerun_by))
        return plain + repeated(again)

    def _sum(self, kind: LayerKind, name: object, chosen: Callable[[Operation], bool]) -> Times:
        """The summed times of a named selection of a layer's operations."""

        def of_block(key: tuple[object, ...], operations: Sequence[Operation]) -> dict[str, Times]:
            times = self._timed(key, operations)
            return {"sum": added(times[op.name] for op in operations if chosen(op))}

        blocks = self._blocks(kind)
        return added(self._once((name, *b[0]), partial(of_block, *b))["sum"] for b in blocks)

    def embedding(self) -> Times:
        """The embedding lookup, and its reduction over the tensor-parallel ranks."""
        size = self.hidden_bytes
        moved = arrived = 0.0
        if self.grid.tp > 1:
            way = gather if self.parallel.sequence_parallel else all_reduce
            moved = way(self.cluster, self.tp, size)
        if self.software.whole_embedding:
            moved, arrived = 0.0, moved * self.parallel.sequence_parallel
        looked_up = self._elementwise(2 * size, 3 * size)
        if not self.model.trains_all:
            looked_up = self._elementwise(2 * size, 0.0)
        looked_up += self._scaled(self.model.embedding_multiplier != 1.0)
        if self.model.embed_layernorm:
            norm = self._norm()
            looked_up += norm if self.model.trains_all else Times(Phases(norm.compute.forward))
        return looked_up + Times(tp=Phases(moved, arrived))

    @property
    def entries(self) -> int:
        """Rows of the output layer on one rank: entries of the padded vocabulary."""
        return self.model.padded_vocab_size // self.grid.tp

    def output_layer(self) -> Times:
        """The output layer, for one of the predicted tokens."""
        # 8-bit recipes leave the output layer alone.
        weight, precision = (self.entries, self.model.hidden_size), self.training.precision
        column = self._column(lambda tokens: self._linear(weight, tokens, precision=precision))
        return column if self.model.trains_all else column.without_dw()

    def head(self) -> Times:
        """Final norm, output layer and loss, once for the model and once per prediction layer."""
        model, fusion = self.model, self.memory.cross_entropy_loss_fusion
        logits, column = float(self.tokens) * self.entries, self.output_layer()
        # Kernels one by one, whatever else is fused: 34 bytes in fp32, 12 where a log-softmax and
        # two gradients have the type of the logits.
        moved = (8, 6) if fusion else (4, 8) if self.software.narrow_loss else (24, 10)
        arrived = Times()
        if self.software.whole_logits and self.grid.tp > 1:
            logits *= self.grid.tp
            sent = gather(self.cluster, self.tp, logits * ELEMENT)
            arrived = Times(tp=Phases(sent)) + self._elementwise(2 * ELEMENT * logits, 0.0)
        loss = Times(Phases(*(elementwise(self.gpu, size * logits) for size in moved)))
        once = self._norm() + self._scaled(model.logits_scaling != 1.0) + column + arrived + loss
        if self.memory.recomputes_logits:
            once = once + Times(recompute=Phases(0.0, column.compute.forward))
        return once * (1 + model.mtp_num_layers)

    def host(self, kind: LayerKind) -> float:
        """Seconds in which the host issues a layer's forward; a backward takes twice that."""
        replayed = self.layout.config.training.cuda_graph_impl is not None
        if replayed or self.software.whole_graph:
            return 0.0
        return forward_operations(self.layout, kind, self.software) * self.cluster.host_operation

    def _issued(self, times: Times, kind: LayerKind, again: Again) -> Times:
        """The times, with each phase at least as long as the host needs to issue it.

        A backward that runs the layer again issues its forward, too. Where dW is computed apart
        from dX, neither hides what the host needs for the other. A host that waits for every
        kernel issues nothing meanwhile, so that both times add up.
        """
        host, total = self.host(kind), times.total
        backward = host * (3 if again is None else 2)
        if self.software.blocks_launches:
            return times + Times(host=Phases(host, backward))
        forward = max(0.0, host - total.forward)
        if not self.defers:
            wait = Phases(forward, max(0.0, backward - total.dx - total.dw))
            return times + Times(host=wait)
        operations = forward_operations(self.layout, kind, self.software)
        later = host * dw_operations(self.layout, kind, self.software) / operations
        dx, dw = max(0.0, backward - later - total.dx), max(0.0, later - total.dw)
        return times + Times(host=Phases(forward, dx, dw))

    def later(self, seconds: float, work: Phases) -> Phases:
        """Seconds by which a transfer of `seconds` ends after the work that it overlaps: a
        forward's, and a backward's (only its dX if dW is deferred)."""
        backward = work.dx if self.defers else work.dx + work.dw
        return Phases(max(0.0, seconds - work.forward), max(0.0, seconds - backward))

    def _copied(self, times: Times, kind: LayerKind, again: Again) -> Times:
        """The times, plus the part of offloading that does not overlap with the layer's work."""
        if not self.memory.fine_grained_activation_offloading:
            return times
        layer, running = layer_kinds(self.model)[kind], self._running
        if again == ():
            running = replace(running, memory=self.memory.without_recompute)
        saved = saved_activations(self.model, layer, running)
        seconds = self.tokens * total(saved).offloaded / self.cluster.host_bandwidth
        return times + Times(offload=self.later(seconds, times.total))

    def operations(self, kind: LayerKind) -> dict[str, Times]:
        """The times of a layer's operations, in their order."""
        found: dict[str, Times] = {}
        for block in self._blocks(kind):
            found |= self._timed(*block)
        return {op.name: found[op.name] for op in describe(self.model, kind).operations}

    def _blocks(self, kind: LayerKind) -> list[tuple[tuple[object, ...], tuple[Operation, ...]]]:
        """The operations of a layer, divided by the settings that they depend on, for one model and
        cluster; and those settings.

        What becomes of experts' rows is the same in every layout with as many tokens on a rank.
        """
        on_tokens, on_rows = _divided(self.model, kind)
        dense = (kind, self.grid.tp, self.parts, self.grid.cp, self.tokens, self.defers)
        if not on_rows:
            return [(dense, on_tokens)]
        dispatcher = self.parallel.moe_token_dispatcher_type
        experts = ("rows", kind, self._own, self.grid.ep, self.grid.etp, dispatcher)
        return [(dense, on_tokens), (experts, on_rows)]

    def _timed(self, key: tuple[object, ...], operations: Sequence[Operation]) -> dict[str, Times]:
        return self._once(key, lambda: {op.name: self.operation(op) for op in operations})

    def _once(
        self, key: tuple[object, ...], block: Callable[[], dict[str, Times]]
    ) -> dict[str, Times]:
        if key not in self._times_cache:
            self._times_cache[key] = block()
        return self._times_cache[key]

    def every_second(self) -> Times:
        """Recomputation of every second multiplication, and of all that is not a multiplication.

        These are k, o and up among q, k, v, o, gate, up and down; with tensor parallelism not o,
        whose sum over the ranks is kept.
        """
        weights = describe(self.model, LayerKind()).weights
        local = {weight.name: weight.local(self.grid.tp) for weight in weights}
        up = local["mlp.up_proj.weight"]
        again = (local["self_attn.k_proj.weight"], up)
        gathered = (self._column(partial(self._linear, weight)) for weight in again)
        rest = self._activation(self.tokens * up[0]) + self._norm() * 2
        if self.grid.tp == 1:
            rest += Times(self._linear(local["self_attn.o_proj.weight"], self.tokens))
        return sum(gathered, rest)


def message_bytes(times: LayerTimes) -> float:
    """Bytes that a rank sends to the next pipeline stage for a slice of the sequences."""
    return times.hidden_bytes / times.parallel.num_sequence_slices / times.parts
