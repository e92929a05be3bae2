"""Model state per rank: bytes of weights, gradients and optimizer state.

Bytes per parameter are a framework's policy; the number of parameters on a rank follows from the
layout. Planner, audit and the table of derived numbers all use these counts.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import gcd, prod

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.training import ELEMENT_BYTES
from fivefold.layout import Layout
from fivefold.model.description import layer_kind
from fivefold.model.shape import StageParts, WholeModel, layer_weights, stage_weights


@dataclass(frozen=True)
class StatePolicy:
    """Bytes per parameter that a framework keeps, and which of them data-parallel ranks shard.

    Attributes:
        copy: bytes of the compute-dtype copy of a weight; 0 if the master itself is used.
        gradient: bytes of the accumulated gradient.
        master: bytes of the weight that the optimizer updates.
        moments: bytes of all optimizer moments together.
        splits_copy: whether copies exist only while their block computes (ZeRO-3).
        splits_gradient: whether gradients are reduced to shards in every microbatch (ZeRO-2, 3).
        splits_optimizer: whether master and moments are sharded (ZeRO-1, 2, 3).
        fresh: bytes of a weight's gradient before it is accumulated; 0 if the matrix multiplication
            accumulates directly.
        placeholder: bytes of the empty gradient kept for each distinct weight of a layer.
        reducing: bytes of a layer's gradients in reduction while the next layer computes.
        in_flight: number of layers whose copies are held at once if copies are sharded: the one
            that computes and those being gathered. Both ends of a stage are held while it runs.
        compute: bytes of a weight in the compute dtype.
        offloaded: share of the parameters whose master and moments are in host memory, to which
            gradients leave when they are reduced; the device keeps them in the compute dtype.
        on_disk: whether these masters and moments lie on a disk instead.
    """

    copy: float
    gradient: float
    master: float
    moments: float
    splits_copy: bool = False
    splits_gradient: bool = False
    splits_optimizer: bool = False
    fresh: float = 0.0
    placeholder: float = 0.0
    reducing: float = 0.0
    in_flight: int = 2
    compute: float = 2.0
    offloaded: float = 0.0
    on_disk: bool = False

    @property
    def device_masters(self) -> float:
        """Bytes of masters on the device, averaged over all parameters."""
        return (1 - self.offloaded) * self.master

    @property
    def device_moments(self) -> float:
        """Bytes of moments on the device, averaged over all parameters."""
        return (1 - self.offloaded) * self.moments

    @property
    def device_stand_ins(self) -> float:
        """Bytes of compute-dtype weights that replace offloaded masters, averaged over parameters.

        FSDP2 gathers from them, and where copies are permanent keeps both.
        """
        return self.offloaded * self.compute

    @property
    def device_gradient(self) -> float:
        """Bytes of gradient shards on the device, averaged over all parameters."""
        return (1 - self.offloaded) * self.gradient


def engine_policy(config: Config) -> StatePolicy:
    """Fivefold's policy: masters and gradients in at least fp32, copies in the compute dtype."""
    sharding, precision = config.parallel.sharding, config.training.precision
    memory = config.memory
    compute, master = ELEMENT_BYTES[precision], max(4, ELEMENT_BYTES[precision])
    shared = sharding.splits_optimizer
    return StatePolicy(
        copy=compute if shared or compute != master else 0,
        gradient=master,
        master=master,
        moments=2 * master,
        splits_copy=sharding.splits_parameters,
        splits_gradient=sharding.splits_gradients,
        splits_optimizer=shared,
        fresh=compute,
        reducing=compute + master if shared else 0,
        compute=compute,
        offloaded=memory.optimizer_offload_fraction if memory.optimizer_cpu_offload else 0.0,
        on_disk=memory.optimizer_offload_path is not None,
    )


def megatron_policy(splits_optimizer: bool) -> StatePolicy:
    """Megatron-LM's policy in bf16: matrix multiplications accumulate gradients in fp32.

    Autograd then receives an empty gradient: a new one each time for the output layer, and one kept
    per shape by Transformer Engine for the layers' weights.
    """
    return StatePolicy(
        copy=2,
        gradient=4,
        master=4,
        moments=8,
        splits_optimizer=splits_optimizer,
        fresh=2,
        placeholder=2,
    )


@dataclass(frozen=True)
class ModelState:
    """Bytes that a rank keeps between microbatches, excluding activations.

    On the device, unless stated otherwise.

    Attributes:
        parameters: number of parameters on the rank after tensor and pipeline parallelism.
        masters: bytes of the weights that the optimizer updates, or for which the host does.
        copies: bytes of permanent compute-dtype copies of weights.
        gradients: bytes of accumulated gradients.
        optimizer: bytes of optimizer moments.
        gathered: bytes of copies of layers, and of a stage's ends, gathered for computing only.
        host: bytes in host memory: offloaded masters and moments, and room for their gradients.
        disk: bytes of offloaded masters and moments on a disk, which are then not in host memory.
        updated: number of parameters that the rank updates, here or on the host.
    """

    parameters: int
    masters: float
    copies: float
    gradients: float
    optimizer: float
    gathered: float
    host: float = 0.0
    disk: float = 0.0
    updated: int = 0

    @property
    def weights(self) -> float:
        """Bytes of masters and permanent copies."""
        return self.masters + self.copies

    @property
    def total(self) -> float:
        """Bytes of everything on the device."""
        return self.weights + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class GatheredBlock:
    """Parameters that are gathered together.

    A block is a layer (with norms and projection for a multi-token prediction layer), or the ends
    of the model in a stage.

    Attributes:
        dense: local shapes of parameters on the attention mesh, after tensor parallelism.
        experts: local shapes of parameters on the expert mesh, after expert and tensor parallelism.
        count: number of such blocks in the stage.
    """

    dense: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]
    count: int = 1

    @property
    def size(self) -> int:
        """Elements of one block."""
        return sum(map(prod, (*self.dense, *self.experts)))


def stage_blocks(layout: Layout, stage: StageParts) -> list[GatheredBlock]:
    """The blocks of a stage: its ends, then further predictions, then each kind of layer."""
    model, grid = layout.config.model, layout.grid
    degrees = (grid.tp, grid.ep, grid.etp)
    around = WholeModel((), stage.embedding, stage.head, stage.mtp)
    ends = _block(model, degrees, around, leaves_out="mtp.")
    predicts = _block(model, degrees, around, only="mtp.0.")
    further = [replace(predicts, count=stage.mtp)] if stage.mtp else []
    kinds = Counter(layer_kind(model, layer) for layer in stage.layers)
    first = {layer_kind(model, layer): layer for layer in reversed(stage.layers)}
    layers = [
        replace(_block(model, degrees, WholeModel((first[kind],), False, False)), count=count)
        for kind, count in kinds.items()
    ]
    return [ends, *further, *layers]


@lru_cache(maxsize=1024)
def _block(
    model: ModelConfig,
    degrees: tuple[int, int, int],
    parts: WholeModel,
    *,
    only: str = "",
    leaves_out: str | None = None,
) -> GatheredBlock:
    """The block of parameters whose names start with `only` and not with `leaves_out`."""
    tp, ep, etp = degrees
    dense: list[tuple[int, ...]] = []
    experts: list[tuple[int, ...]] = []
    for name, weight in stage_weights(model, parts).items():
        if not name.startswith(only) or (leaves_out and name.startswith(leaves_out)):
            continue
        place = experts if weight.of_experts else dense
        place.append(weight.local(tp, ep, etp))
    return GatheredBlock(tuple(dense), tuple(experts))


def stages_held(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The stages that a pipeline rank holds; those of a second copy of the model come last."""
    stages = layout.split.stages_of(pp_rank)
    if layout.num_copies == 2:
        stages += layout.split.stages_of(layout.grid.pp - 1 - pp_rank)
    return stages


def num_shards(layout: Layout) -> int:
    """Number of ranks that share the optimizer state of a dense parameter."""
    shared = layout.config.parallel.sharding.splits_optimizer
    return layout.grid.dp_shard * layout.grid.cp if shared else 1


def num_expert_shards(layout: Layout) -> int:
    """Number of ranks that share the optimizer state of an expert's parameter."""
    edp = layout.grid.edp
    return 1 if num_shards(layout) == 1 else edp // gcd(edp, layout.grid.dp_replicate)


def held(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """Elements of a parameter in one shard; FSDP2 splits rows, and last shards may be shorter."""
    each = -(-shape[0] // shards)
    return min(max(shape[0] - shard * each, 0), each) * prod(shape[1:])


def held_of_experts(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """Like `held` for experts: shards split features if they do not divide the experts."""
    if len(shape) < 3 or shape[0] % shards == 0 or shape[1] % shards:
        return held(shape, shards, shard)
    return prod(shape) // shards


def model_state(
    layout: Layout,
    pp_rank: int,
    shard: int = 0,
    policy: StatePolicy | None = None,
    *,
    expert_shard: int = 0,
) -> ModelState:
    """Bytes that a rank keeps of weights, gradients and optimizer state.

    Args:
        layout: layout of the run.
        pp_rank: pipeline rank.
        shard: index among the ranks that share the state; the first one holds the most.
        policy: the framework's policy; None: Fivefold's.
        expert_shard: index among the ranks that share the state of experts.
    """
    policy = policy or engine_policy(layout.config)
    at = _Shard(num_shards(layout), shard, num_expert_shards(layout), expert_shard)
    whole = gathered = own = 0
    for index in stages_held(layout, pp_rank):
        ends, *layers = stage_blocks(layout, layout.split.stages[index])
        for block in (ends, *layers):
            whole += block.count * block.size
            own += block.count * at.held(block)
        largest = max((block.size for block in layers), default=0)
        gathered = max(gathered, ends.size + policy.in_flight * largest)
    optimizer = own if policy.splits_optimizer else whole
    away = optimizer
    if policy.offloaded < 1:
        away = sum(at.held(block) for block in units_on_host(layout, pp_rank).values())
    here = optimizer - away
    gradients = (own if policy.splits_gradient else whole) * policy.gradient
    if policy.splits_gradient and not _holds_partial_sums(layout):
        gradients = here * policy.gradient
    if policy.placeholder:
        gradients += _distinct_weights(layout, pp_rank) * policy.placeholder
    lying = policy.master + policy.moments
    return ModelState(
        parameters=whole,
        masters=here * policy.master + away * policy.compute,
        copies=0 if policy.splits_copy else whole * policy.copy,
        gradients=gradients,
        optimizer=here * policy.moments,
        gathered=gathered * policy.copy if policy.splits_copy else 0,
        host=away * (policy.gradient + (0 if policy.on_disk else lying)),
        disk=away * lying if policy.on_disk else 0,
        updated=optimizer,
    )


@dataclass(frozen=True)
class _Shard:
    """A rank's place among those that share the state of dense parameters, and of experts."""

    shards: int
    shard: int
    expert_shards: int
    expert_shard: int

    def held(self, block: GatheredBlock) -> int:
        """Elements of one block that the rank keeps."""
        dense = sum(held(shape, self.shards, self.shard) for shape in block.dense)
        return dense + sum(
            held_of_experts(shape, self.expert_shards, self.expert_shard) for shape in block.experts
        )


def _holds_partial_sums(layout: Layout) -> bool:
    """Whether sums of gradients over microbatches wait on the device for those of replicas."""
    return layout.grid.dp_replicate > 1 and layout.num_microbatches > 1


def units_on_host(layout: Layout, pp_rank: int) -> dict[tuple[int, str], GatheredBlock]:
    """What of a rank's state is in host memory: (stage, "layers.3", "mtp.0", or "" for the ends).

    Whole layers, the last ones first, since their gradients come first, and the ends of the stages
    after all of them, until the share is at least `optimizer_offload_fraction`.
    """
    share = engine_policy(layout.config).offloaded
    shards, expert_shards = num_shards(layout), num_expert_shards(layout)
    units = [
        ((index, name), block)
        for index, stage in reversed(layout.stages_of(pp_rank).items())
        for name, block in _stage_units(layout, stage)
    ]
    units.sort(key=lambda unit: _ORDER.index(unit[0][1].partition(".")[0]))
    sizes = [
        sum(map(prod, block.dense)) / shards + sum(map(prod, block.experts)) / expert_shards
        for _, block in units
    ]
    before = accumulate(sizes, initial=0.0)
    return {
        unit: block
        for (unit, block), moved in zip(units, before, strict=False)
        if moved < share * sum(sizes)
    }


_ORDER = ("layers", "mtp", "")


def _stage_units(layout: Layout, stage: StageParts) -> Iterator[tuple[str, GatheredBlock]]:
    """The blocks of a stage one by one, by the start of their names, last layers first."""
    ends, *blocks = stage_blocks(layout, stage)
    model = layout.config.model
    if stage.mtp:
        yield from ((f"mtp.{depth}", blocks[0]) for depth in reversed(range(stage.mtp)))
        blocks = blocks[1:]
    kinds = dict.fromkeys(layer_kind(model, layer) for layer in stage.layers)
    of = dict(zip(kinds, blocks, strict=True))
    for layer in reversed(stage.layers):
        yield f"layers.{layer}", of[layer_kind(model, layer)]
    yield "", ends


def unit_of(name: str) -> str:
    """The unit of `units_on_host` that a parameter belongs to."""
    kind, _, rest = name.partition(".")
    return f"{kind}.{rest.partition('.')[0]}" if kind in _ORDER[:2] else ""


def _distinct_weights(layout: Layout, pp_rank: int) -> int:
    """Elements of the matrices of a rank's layers, with equal layers counted once."""
    model, grid = layout.config.model, layout.grid
    layers = [i for s in stages_held(layout, pp_rank) for i in layout.split.stages[s].layers]
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for layer in {layer_kind(model, i): i for i in layers}.values():
        for name, weight in layer_weights(model, layer).items():
            local = weight.local(grid.tp, grid.ep, grid.etp)
            if len(local) > 1:
                found[name, local[-2:]] = prod(local[-2:])
    return sum(found.values())
