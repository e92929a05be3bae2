"""Bytes of weights, gradients and optimizer state per rank; all who count state use these."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from math import prod

from fivefold.config.memory import WEIGHT_ROOMS, room_for, update_rooms
from fivefold.config.training import BLOCK, TrainingConfig
from fivefold.counts.blocks import GatheredBlock, stage_blocks
from fivefold.counts.policy import StatePolicy, engine_policy, layout_policy
from fivefold.data_parallel.blocks import UnitSizes, shard_dim
from fivefold.description.layers import layer_kind
from fivefold.description.shape import StageParts, layer_weights
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import OPERANDS, delayed_bytes


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
        gathered: bytes of copies of layers, and of a stage's ends, gathered for computing only, of
            shards that visit the device for that, and of this rank's part of a second copy (hpZ).
        host: bytes in host memory: offloaded masters and moments, and offloaded weights, or rooms
            for those that come from a disk, and room for gradients.
        disk: bytes of offloaded masters, moments and weights on a disk, not in host memory.
        updated: number of parameters that the rank updates, here or on the host.
        rooms: bytes of the rooms in which offloaded state is updated on the device.
        scales: bytes of delayed scales of 8-bit operands, and of their histories.
    """

    parameters: int
    masters: float
    copies: float
    gradients: float
    optimizer: float
    gathered: float
    host: float
    disk: float
    updated: int
    rooms: float
    scales: float

    @property
    def weights(self) -> float:
        """Bytes of masters and permanent copies."""
        return self.masters + self.copies

    @property
    def total(self) -> float:
        """Bytes of everything on the device."""
        lasting = self.weights + self.gradients + self.optimizer + self.rooms + self.scales
        return lasting + self.gathered


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
    return 1 if num_shards(layout) == 1 else layout.grid.expert_shards


def held(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """Elements of a parameter in one shard; FSDP2 splits rows, and last shards may be shorter."""
    each = -(-shape[0] // shards)
    return min(max(shape[0] - shard * each, 0), each) * prod(shape[1:])


def held_of_experts(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """Like `held` for experts: shards split features if they do not divide the experts."""
    return prod(shape) // shards if shard_dim(shape, shards) else held(shape, shards, shard)


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
    policy = policy or layout_policy(layout)
    at = _Shard(num_shards(layout), shard, num_expert_shards(layout), expert_shard)
    whole = frozen = 0
    copies = gathered = 0.0
    trained, own = 0, 0  # all that is trained here, and this rank's shards of it
    beyond = 0.0  # bytes of moments in 8 bits that are more than those of whole blocks
    places = at if policy.splits_optimizer else _Shard(1, 0, 1, 0)
    kept = 0.0
    linears = waiting = 0
    for index in stages_held(layout, pp_rank):
        stage = layout.split.stages[index]
        ends, *layers = stage_blocks(layout, stage, whole_embedding=policy.whole_embedding)
        for block in stage_blocks(
            layout, stage, trained=True, whole_embedding=policy.whole_embedding
        ):
            trained += block.count * block.size
            own += block.count * at.held(block)
            waiting += block.count * at.held(partial_sums(layout, block))
            beyond += block.count * places.beyond(block, policy)
        for block in (ends, *layers):
            whole += block.count * block.size
            linears += block.count * block.linears
            copies += block.count * block.copied(policy)
            frozen += block.count * at.held(block)
            kept += block.count * _second_copy(layout, block, policy)
        gathered = max(gathered, gathered_bytes(layout, stage, policy))
    frozen -= own
    optimizer = own if policy.splits_optimizer else trained
    leaves = units_on_host(layout, pp_rank).values() if policy.offloaded else ()
    away = optimizer if policy.offloaded == 1 else sum(map(at.held, leaves))
    here, off = optimizer - away, _off_device(at, leaves, policy, away)
    weights, visiting = _away(layout, pp_rank, policy)
    rooms = WEIGHT_ROOMS * visiting if policy.away_on_disk else weights
    if policy.offloaded < 1:
        waiting = sum(at.held(partial_sums(layout, block)) for block in leaves)
    gradients = (here + waiting if policy.splits_gradient else trained) * policy.gradient
    if policy.placeholder:
        gradients += _distinct_weights(layout, pp_rank) * policy.placeholder
    return ModelState(
        parameters=whole,
        masters=here * policy.master + (frozen + (0 if policy.away else away)) * policy.compute,
        copies=0 if policy.splits_copy else copies,
        gradients=gradients,
        optimizer=here * policy.moments + beyond - off.beyond,
        gathered=gathered + kept + visiting if policy.splits_copy else 0,
        host=away * policy.gradient + (off.rooms if policy.on_disk else off.kept) + rooms,
        disk=(off.kept if policy.on_disk else 0) + (weights if policy.away_on_disk else 0),
        updated=optimizer,
        rooms=off.gradients + off.rooms if policy.visits else 0,
        scales=_delayed_scales(layout.config.training, linears),
    )


def gathered_bytes(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of the copies that are gathered at once while a stage computes.

    What is gathered beside a layer are other layers, without experts that are gathered apart.
    """
    ends, *layers = stage_blocks(layout, stage, whole_embedding=policy.whole_embedding)
    largest = max((block.copied(policy) for block in layers), default=0.0)
    others = max((block.parts(policy)[1].copied(policy) for block in layers), default=0.0)
    beside = min(policy.in_flight, sum(block.count for block in layers)) - 1
    return ends.copied(policy) + largest + max(beside, 0) * others


def stage_gradients(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of a stage's gradients on the first of the ranks that share them."""
    whole = policy.whole_embedding
    blocks = stage_blocks(layout, stage, trained=True, whole_embedding=whole)
    each = partial(first_shard, layout) if policy.splits_gradient else (lambda block: block.size)
    return policy.gradient * sum(block.count * each(block) for block in blocks)


def stage_narrow(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of a stage's weights in 8 bits that microbatches share, for one of the two products."""
    return policy.step_weight * sum(
        block.count * sum(block.narrow) for block in stage_blocks(layout, stage)
    )


def first_shard(layout: Layout, block: GatheredBlock) -> int:
    """Elements of a block on the first of the ranks that share the optimizer state."""
    return _Shard.first(layout).held(block)


def largest_of_shard(layout: Layout, block: GatheredBlock) -> int:
    """Those of the parameter of which that rank has most."""
    parts = _Shard.first(layout).parts(block)
    return max((size for _, size in parts), default=0)


@dataclass(frozen=True)
class _OffDevice:
    """Bytes of masters and moments that are off the device.

    Attributes:
        kept: all of them.
        beyond: those of moments in 8 bits that are more than the policy says.
        rooms: rooms through which they pass.
        gradients: the same for their gradients.
    """

    kept: float
    beyond: float
    rooms: float
    gradients: float


def _off_device(
    at: "_Shard", blocks: Collection[GatheredBlock], policy: StatePolicy, elements: int
) -> _OffDevice:
    """What is off the device of so many elements, those of some blocks."""
    each = policy.master + policy.moments
    beyond = sum(at.beyond(block, policy) for block in blocks)
    number, capacity = update_rooms(elements)
    room = capacity * each + at.beyond_of_room(blocks, policy, capacity)
    gradients = number * capacity * policy.gradient
    return _OffDevice(elements * each + beyond, beyond, number * room, gradients)


def _delayed_scales(training: TrainingConfig, linears: int) -> int:
    """Bytes of the delayed scales of so many 8-bit linear layers."""
    return OPERANDS * linears * delayed_bytes(training) if training.delays_scales else 0


def _away(layout: Layout, pp_rank: int, policy: StatePolicy) -> tuple[float, float]:
    """Bytes of a rank's weights that are not on the device, padded, and of the most gathered at
    once."""
    if not policy.away:
        return 0.0, 0.0
    first = _Shard.first(layout)
    blocks = units_on_host(layout, pp_rank).values()
    parts = [replace(b, dense=()) for b in blocks] + [replace(b, experts=()) for b in blocks]
    sizes = [first.held(part) * policy.compute for part in parts]
    return sum(sizes), max(sizes, default=0.0)


def _second_copy(layout: Layout, block: GatheredBlock, policy: StatePolicy) -> float:
    """Bytes of a rank's part of what its node keeps of a gathered block, as it was sent (hpZ)."""
    rounded, gathers_8_bits = policy.unpacking > 0, layout.config.training.fp8_param_gather
    narrow = block.narrow if gathers_8_bits else (0, 0)
    each = zip((block.dense, block.experts), narrow, layout.node_sizes, strict=True)
    return sum(
        UnitSizes.whole(shapes, few).gathered(policy.compute, rounded=rounded) / nodes.hpz
        for shapes, few, nodes in each
        if nodes.hpz > 1
    )


@dataclass(frozen=True)
class _Shard:
    """A rank's place among those that share the state of dense parameters, and of experts."""

    shards: int
    shard: int
    expert_shards: int
    expert_shard: int

    @classmethod
    def first(cls, layout: Layout) -> "_Shard":
        """The place of the first rank, which keeps most."""
        return cls(num_shards(layout), 0, num_expert_shards(layout), 0)

    def held(self, block: GatheredBlock) -> int:
        """Elements of one block that the rank keeps."""
        return _elements(self, block)

    def beyond(self, block: GatheredBlock, policy: StatePolicy) -> float:
        """Bytes of a block's moments that are more than `policy.moments` says: of some in 8 bits,
        and with Muon the second ones."""
        if policy.muon:
            return policy.wide * (self.held(block) - self.held(block.matrices))
        return sum(beyond(shape, size, policy) for shape, size in self.parts(block))

    def beyond_of_room(
        self, blocks: Collection[GatheredBlock], policy: StatePolicy, elements: int
    ) -> float:
        """The same of a room through which the state of some blocks passes."""
        if not (blocks and policy.eight_bit):
            return 0.0
        pairs = [part for block in blocks for part in self.parts(block)]
        vectors = room_for(elements, ((size, size * (len(shape) == 1)) for shape, size in pairs))
        numbers = room_for(elements, ((size, size * (len(shape) > 1)) for shape, size in pairs))
        scales = room_for(elements, ((size, _moment_scales(shape, size)) for shape, size in pairs))
        room = numbers + scales + policy.wide * vectors
        return policy.eight_bit * (room - elements * (1 + 1 / BLOCK))

    def parts(self, block: GatheredBlock) -> Iterator[tuple[tuple[int, ...], int]]:
        """The shape of each parameter of a block, and the elements that the rank keeps."""
        for shape in block.dense:
            yield shape, held(shape, self.shards, self.shard)
        for shape in block.experts:
            yield shape, held_of_experts(shape, self.expert_shards, self.expert_shard)


@lru_cache(maxsize=4096)
def _elements(at: _Shard, block: GatheredBlock) -> int:
    """As `_Shard.held` has it: a search asks often, and for few."""
    return sum(size for _, size in at.parts(block))


def beyond(shape: tuple[int, ...], size: int, policy: StatePolicy) -> float:
    """Bytes of moments in 8 bits, of `size` elements of a parameter, more than `policy` says.

    A row that ends within a block has a scale for the rest, and vectors keep their type.
    """
    if not policy.eight_bit:
        return 0.0
    each = policy.wide * size if len(shape) == 1 else size + _moment_scales(shape, size)
    return policy.eight_bit * (each - size * (1 + 1 / BLOCK))


def _moment_scales(shape: tuple[int, ...], size: int) -> int:
    """Scales of a moment in 8 bits, of rows of `size` elements of a parameter of this shape."""
    return size // shape[-1] * -(-shape[-1] // BLOCK) if len(shape) > 1 else 0


def partial_sums(layout: Layout, block: GatheredBlock) -> GatheredBlock:
    """What of a block has sums of gradients over microbatches that wait on the device for those of
    replicas, of which experts may have more."""
    grid, several = layout.grid, layout.num_microbatches > 1
    return replace(
        block,
        dense=block.dense if several and grid.dp_replicate > 1 else (),
        experts=block.experts if several and grid.edp > num_expert_shards(layout) else (),
    )


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
