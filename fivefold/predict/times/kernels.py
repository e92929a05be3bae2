"""Details of a plan's kernel efficiency: the kernels of a step, and their speed."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from fivefold.config.model import ModelConfig
from fivefold.description.core_attention import CoreAttention
from fivefold.description.experts import ExpertsIn, ExpertsOut
from fivefold.description.kinds import LayerKind
from fivefold.description.layers import describe
from fivefold.description.linear_attention import Recurrence
from fivefold.description.lora import Adapters
from fivefold.description.operations import Operation
from fivefold.description.shape import all_layers, kinds_of, training_flops
from fivefold.description.weights import Weight
from fivefold.layout import Layout
from fivefold.predict.prediction import Prediction
from fivefold.predict.times.layer import LayerTimes

MEMORY_BOUND = "norms, sums, activations"
HOST = "waiting for the host"
_NEXT_TO_NOTHING = 1e-9  # seconds: rounding of a difference of sums


@dataclass(frozen=True)
class KernelKind:
    """Kernels of one kind in a step, on a mean rank; recomputation is not among them.

    Attributes:
        name: name of the operation in the description of a layer, or what it is.
        shape: what one call multiplies on a rank, as rows x outputs x inputs; empty if nothing.
        seconds: predicted seconds.
        ideal: seconds that its model FLOPs would take at the peak of the data sheet.
    """

    name: str
    shape: str
    seconds: float
    ideal: float

    @property
    def excess(self) -> float:
        """Seconds beyond the ideal."""
        return self.seconds - self.ideal

    @property
    def share_of_peak(self) -> float:
        """Rate of its model FLOPs, relative to the peak; 0 if it has none."""
        return self.ideal / self.seconds if self.seconds else 0.0


def kernels(prediction: Prediction) -> list[KernelKind]:
    """The kernels of a step, those with the most seconds beyond their ideal first.

    Their ideals sum up to the part "ideal" of the prediction, their excess to "kernel efficiency":
    what this has beyond all kernels is waiting for the host.
    """
    layout, cluster, software = prediction.layout, prediction.cluster, prediction.software
    config = layout.config
    tokens = config.training.step_tokens
    peak = cluster.gpu.peak.of(layout.config.product_precision) * layout.grid.world_size
    seconds, ideals = defaultdict[str, float](float), defaultdict[str, float](float)
    shapes: dict[str, str] = {}
    share = layout.num_microbatches / layout.grid.pp
    times = LayerTimes(layout, cluster, software)
    for name, shape, each, flops in _all(layout, times):
        seconds[name] += each * share
        ideals[name] += flops * tokens / peak
        shapes[name] = shape
    parts = {part.name: part.seconds for part in prediction.parts}
    seconds[HOST] = parts["ideal"] + parts["kernel efficiency"] - sum(seconds.values())
    shapes[HOST] = ""
    found = [KernelKind(name, shapes[name], seconds[name], ideals[name]) for name in seconds]
    shown = (kernel for kernel in found if kernel.name != HOST or kernel.seconds > _NEXT_TO_NOTHING)
    return sorted(shown, key=lambda kernel: -kernel.excess)


_Row = tuple[str, str, float, float]
"""Name, shape, seconds of all calls for a microbatch, model FLOPs of a token."""


def _all(layout: Layout, times: LayerTimes) -> Iterator[_Row]:
    model, stages = layout.config.model, layout.split.stages
    layers = kinds_of(model, chain.from_iterable(all_layers(model, stage) for stage in stages))
    for kind, count in layers.items():
        yield from _of_layers(times, kind, count)
    attention = training_flops(model, layout.config.attended_length).attention
    attention -= sum(_state_flops(model, kind) * count for kind, count in layers.items())
    yield "core_attn", _attention_shape(times), 0.0, attention
    looked_up = sum(stage.embedding + stage.mtp for stage in stages)
    yield MEMORY_BOUND, "", times.embedding().compute.total * looked_up, 0.0
    runs, output = 1 + model.mtp_num_layers, times.output_layer().compute.total
    size = model.padded_vocab_size * model.hidden_size * (6 if model.trains_all else 4)
    shape = f"{times.tokens:,} x {times.entries:,} x {model.hidden_size:,}"
    yield "output layer", shape, output * runs, size * runs
    yield "loss and last norm", "", times.head().compute.total - output * runs, 0.0


def _of_layers(times: LayerTimes, kind: LayerKind, count: int) -> Iterator[_Row]:
    """The operations of `count` layers of a kind."""
    each = times.operations(kind)
    for op in describe(times.model, kind).operations:
        seconds = each[op.name].compute.total
        if isinstance(op, CoreAttention):
            yield op.name, _attention_shape(times), seconds * count, 0.0
        elif isinstance(op, Recurrence):
            shape = f"{op.sizes.heads // times.grid.tp} heads"
            yield op.name, shape, seconds * count, _state_flops(times.model, kind) * count
        elif weights := [weight for weight in op.weights if weight.multiplies]:
            flops = sum(_flops(times, weight) for weight in weights)
            yield op.name, _shape(times, op), seconds * count, flops * count
        else:
            yield MEMORY_BOUND, "", seconds * count, 0.0


def _state_flops(model: ModelConfig, kind: LayerKind) -> int:
    """FLOPs per token of a layer's states, forward and backward."""
    return 3 * describe(model, kind).one(Recurrence).flops if kind.linear else 0


def _flops(times: LayerTimes, weight: Weight) -> float:
    model = times.model
    chosen = model.moe_router_topk / (model.num_experts or 1) if weight.of_experts else 1.0
    return weight.size * chosen * (6 if weight.trained and weight.passes_on else 4)


def _shape(times: LayerTimes, op: Operation) -> str:
    """The matrix sizes of a linear layer on a rank."""
    grid = times.grid
    if isinstance(op, ExpertsIn | ExpertsOut):
        rows, local = times.rows_of_one(op.copies)
        split = (op.outputs // grid.etp, op.inputs)
        if isinstance(op, ExpertsOut):
            split = (op.outputs, op.inputs // grid.etp)
        experts = "1 expert" if local == 1 else f"{local:,} experts"
        return f"{experts}: {rows:,} x {split[0]:,} x {split[1]:,}"
    local_shapes = [weight.local(grid.tp) for weight in op.multiplied]
    if isinstance(op, Adapters) or not local_shapes:
        return ""
    return _joined(times.tokens, local_shapes, joins=times.software.joins_linears)


def _joined(tokens: int, shapes: Sequence[tuple[int, ...]], *, joins: bool) -> str:
    """Products of the same rows: joined if they have the same input, otherwise listed."""
    inputs = {shape[1] for shape in shapes}
    if joins and len(inputs) == 1:
        shapes = [(sum(shape[0] for shape in shapes), *inputs)]
    return " + ".join(f"{tokens:,} x {out:,} x {into:,}" for out, into in dict.fromkeys(shapes))


def _attention_shape(times: LayerTimes) -> str:
    model = times.model
    heads = model.num_attention_heads // times.grid.tp
    sizes = " or ".join(dict.fromkeys(str(own.query_dim) for own in model.attentions))
    return f"{times.config.attended_length:,} tokens, {heads} heads of {sizes}"
