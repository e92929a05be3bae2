"""Operations that adapters (LoRA) add to a layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fivefold.config.model import ModelConfig
from fivefold.description.core_attention import CoreAttention
from fivefold.description.experts import RouterLinear, SharedOut
from fivefold.description.latent import LatentUp
from fivefold.description.operations import Kept, Operation, RowLinear
from fivefold.description.running import Running
from fivefold.description.weights import Weight, frozen


@dataclass(frozen=True, kw_only=True)
class Adapters(Operation):
    """The adapters of the linear layers of one operation; each multiplies by A, then by B.

    Attributes:
        beside: that operation, as it is where its own weights are trained.
        rank: features between A and B.
        columns: its adapted linears that are column-parallel.
        rows: layers that are row-parallel.
        wholes: layers that every tensor-parallel rank holds whole.
        dropped: weights of those that do not split their inputs, if adapters have dropout: each
            then reads, and keeps, an input of its own.
    """

    beside: Operation = field(repr=False)
    rank: int
    columns: int
    rows: int
    wholes: int
    dropped: tuple[Weight, ...]

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """The input of A (that of the linears, or its copy after dropout for each), and the
        features between A and B."""
        size = running.element_bytes * self.rank / running.token_parts
        low = (size,) * (self.columns + self.rows + self.wholes)
        read, again, moved = (
            self.beside.kept_inputs(running),
            _discarding(self),
            self.moved(running),
        )
        if self.dropped:
            read = (Kept(self.beside.name, self._inputs(running), again, moved),)
        return *read, Kept(self.name, low, again, moved)

    def deferred(self, running: Running) -> float:
        """The input; gradients of a few features are negligible."""
        return self.beside.deferred(running) + sum(self._inputs(running)[1:])

    def _inputs(self, running: Running) -> tuple[float, ...]:
        element = running.element_bytes
        return tuple(element * weight.shape[1] / running.token_parts for weight in self.dropped)

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """Those of column-parallel linears with few features, or of row-parallel ones into few."""
        columns, rows = self.columns * self.rank, self.rows * self.rank
        if sequence_parallel:
            return columns + rows, 2 * columns + rows
        return 2 * rows, 2 * columns


@dataclass(frozen=True, kw_only=True)
class Rescaled(Operation):
    """The magnitudes (DoRA) of the adapted linear layers of one operation.

    Attributes:
        measured: the weights of these linear layers, of which it measures the rows.
        apart: whether it multiplies by them once more, since adapters have dropout.
    """

    measured: tuple[Weight, ...]
    apart: bool

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """The scaled result, and the lengths of rows."""
        tp, element, sizes = running.tensor_parallel, running.element_bytes, list[float]()
        for weight in self.measured:
            rows: float = weight.shape[0]
            if weight.split == 0:
                rows /= min(tp, weight.heads or tp)
            made = element * rows / (1 if weight.split == 0 else running.token_parts)
            sizes += [made, running.by_microbatch(max(element, 4) * rows)]
        return (Kept(self.name, (*sizes,), _discarding(self), self.moved(running)),)

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """Those of separate linear layers, if dropout makes it multiply once more."""
        columns = self.apart * sum(w.shape[1] for w in self.measured if w.split == 0)
        rows = self.apart * sum(w.shape[0] for w in self.measured if w.split == 1)
        both = columns + rows
        return (both, both) if sequence_parallel else (2 * rows, 2 * columns)


def _discarding(operation: Operation) -> tuple[str, ...]:
    """Recomputed modules that discard what an operation keeps; mla_up_proj discards results."""
    return tuple(module for module in operation.rerun_by if module != "mla_up_proj")


def with_adapters(operations: Sequence[Operation], model: ModelConfig) -> Iterator[Operation]:
    """The operations of a layer with frozen weights, and adapters before the adapted ones."""
    for operation in operations:
        adapted = [weight for weight in operation.multiplied if _is_adapted(weight, model)]
        adapters = _adapters(operation, adapted, model) if adapted else None
        if adapters is not None:
            yield adapters
        if isinstance(operation, CoreAttention):
            operation = replace(operation, shares_output=model.reads_shared("o_proj"))
        if isinstance(operation, LatentUp):
            shared = model.reads_shared("kv_a_proj") or model.reads_shared("q_proj")
            operation = replace(operation, reads_alone=not shared)
        if isinstance(operation, RouterLinear):
            reads = model.reads_shared("gate_proj") or model.reads_shared("up_proj")
            operation = replace(operation, adapted=reads)
        made = replace(operation, weights=frozen(operation.weights, model))
        if adapters is not None and model.use_dora:
            yield from _with_magnitudes(made, adapted, adapters.rerun_by, model)
        else:
            yield made


def _with_magnitudes(
    operation: Operation, adapted: Sequence[Weight], rerun_by: tuple[str, ...], model: ModelConfig
) -> Iterator[Operation]:
    """A frozen operation and its magnitudes; the backward of a recomputed block repeats it to its
    end, since the scaled result is kept."""
    yield replace(operation, rerun_by=rerun_by)
    lengths = [
        Weight(
            f"{weight.name.removesuffix('.weight')}.lora_magnitude_vector",
            weight.shape[:1],
            0 if weight.split == 0 else None,
            weight.heads,
        )
        for weight in adapted
    ]
    name = f"{operation.name}_dora"
    yield Rescaled(
        name,
        tuple(lengths),
        rerun_by,
        operation.moved_by,
        measured=tuple(adapted),
        apart=model.lora_dropout > 0,
    )


def _is_adapted(weight: Weight, model: ModelConfig) -> bool:
    return model.adapts(weight.name.split(".")[-2]) and not weight.of_experts


def _adapters(operation: Operation, adapted: Sequence[Weight], model: ModelConfig) -> Adapters:
    assert model.lora_rank is not None
    weights: list[Weight] = []
    for weight in adapted:
        name, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
        before = 1 if weight.split == 1 else None
        after = 0 if weight.split == 0 else None
        shapes = (model.lora_rank, inputs), (outputs, model.lora_rank)
        weights.append(Weight(f"{name}.lora_A.weight", shapes[0], before, multiplies=True))
        weights.append(
            Weight(f"{name}.lora_B.weight", shapes[1], after, weight.heads, multiplies=True)
        )
    splits = [weight.split for weight in adapted]
    again = operation.rerun_by
    if isinstance(operation, LatentUp):
        operation = _reading(operation, adapted, model)
    elif isinstance(operation, SharedOut):
        again = "moe", "shared_experts"
    elif isinstance(operation, RowLinear):  # a recomputed block does not repeat its last one
        again += operation.recomputed_by
    return Adapters(
        f"{operation.name}_lora",
        tuple(weights),
        again,
        operation.moved_by,
        beside=operation,
        rank=model.lora_rank,
        columns=splits.count(0),
        rows=splits.count(1),
        wholes=splits.count(None),
        dropped=tuple(w for w in adapted if w.split != 1) if model.lora_dropout else (),
    )


def _reading(up: LatentUp, adapted: Sequence[Weight], model: ModelConfig) -> LatentUp:
    """The up-projections with the latents alone that adapted ones read."""
    keys = up.keys if model.adapts("kv_b_proj") else 0
    queries = sum(w.shape[1] for w in adapted if not w.name.startswith("self_attn.kv_b_proj"))
    if up.uncompressed and model.adapts("kv_a_proj"):
        queries = 0  # queries read the hidden state, counted with the down-projection
    return replace(up, latents=queries + keys, keys=keys)
