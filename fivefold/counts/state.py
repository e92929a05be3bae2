"""Bytes of weights, gradients and optimizer state per rank, for all modules that count state."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

from fivefold.config.memory import NUM_WEIGHT_BUFFERS, buffer_size, update_buffers
from fivefold.config.training import BLOCK, TrainingConfig
from fivefold.counts.blocks import GatheredBlock, stage_blocks
from fivefold.counts.policy import StatePolicy, layout_policy
from fivefold.counts.shards import ShardPlace, num_expert_shards
from fivefold.counts.units import units_on_host
from fivefold.data_parallel.blocks import UnitSizes
from fivefold.description.kinds import layer_kind
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
            shards fetched from the host for that, and of this rank's part of a second copy (hpZ).
        host: bytes in host memory: offloaded masters, moments and weights, or buffers for those
            that come from a disk, and buffers for gradients.
        disk: bytes of offloaded masters, moments and weights on a disk, not in host memory.
        updated: number of parameters that the rank updates, here or on the host.
        update_buffers: bytes of the buffers in which offloaded state is updated on the device.
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
    update_buffers: float
    scales: float

    @property
    def weights(self) -> float:
        """Bytes of masters and permanent copies."""
        return self.masters + self.copies

    @property
    def total(self) -> float:
        """Bytes of everything on the device."""
        lasting = self.weights + self.gradients + self.optimizer + self.update_buffers + self.scales
        return lasting + self.gathered


def stages_held(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The stages that a pipeline rank holds; those of a second copy of the model come last."""
    stages = layout.split.stages_of(pp_rank)
    if layout.num_copies == 2:
        stages += layout.split.stages_of(layout.grid.pp - 1 - pp_rank)
    return stages


def model_state(
    layout: Layout,
    pp_rank: int,
    at: ShardPlace | None = None,
    *,
    policy: StatePolicy | None = None,
) -> ModelState:
    """Bytes that a rank keeps of weights, gradients and optimizer state.

    Args:
        layout: layout of the run.
        pp_rank: pipeline rank.
        at: the rank's place among those that share the state; None: the first, which keeps most.
        policy: the framework's policy; None: Fivefold's.
    """
    policy = policy or layout_policy(layout)
    at = at or ShardPlace.first(layout)
    places = at if policy.splits_optimizer else ShardPlace()
    whole = frozen = linears = waiting = 0
    trained, own = 0, 0  # all elements trained here, and those in this rank's shards
    beyond = 0.0  # bytes of 8-bit moments beyond those of whole blocks
    copies = gathered = kept = 0.0
    for index in stages_held(layout, pp_rank):
        stage, table = layout.split.stages[index], policy.whole_embedding
        for block in stage_blocks(layout, stage, trained=True, whole_embedding=table):
            trained += block.count * block.size
            own += block.count * at.held(block)
            waiting += block.count * at.held(with_replicas(layout, block))
            beyond += block.count * _beyond_of_block(places, block, policy)
        for block in stage_blocks(layout, stage, whole_embedding=table):
            whole += block.count * block.size
            linears += block.count * block.linears
            copies += block.count * block.copied(policy)
            frozen += block.count * at.held(block)
            kept += block.count * _second_copy(layout, block, policy)
        gathered = max(gathered, gathered_bytes(layout, stage, policy))
    frozen -= own
    optimizer = own if policy.splits_optimizer else trained
    leaves = units_on_host(layout, pp_rank).values() if policy.offloaded else ()
    off_device = optimizer if policy.offloaded == 1 else sum(map(at.held, leaves))
    here, off = optimizer - off_device, _off_device(at, leaves, policy, off_device)
    weights, largest = _offloaded_weights(layout, pp_rank, policy)
    buffers = NUM_WEIGHT_BUFFERS * largest if policy.weights_on_disk else weights
    if policy.offloaded < 1:
        waiting = sum(at.held(with_replicas(layout, block)) for block in leaves)
    gradients = (here + waiting if policy.splits_gradient else trained) * policy.gradient
    if policy.placeholder:
        gradients += _distinct_weights(layout, pp_rank) * policy.placeholder
    return ModelState(
        parameters=whole,
        masters=policy.masters(here, off_device, frozen),
        copies=0 if policy.splits_copy else copies,
        gradients=gradients,
        optimizer=here * policy.moments + beyond - off.beyond,
        gathered=gathered + kept if policy.splits_copy else 0,
        host=off_device * policy.gradient + (off.buffers if policy.on_disk else off.kept) + buffers,
        disk=(off.kept if policy.on_disk else 0) + (weights if policy.weights_on_disk else 0),
        updated=optimizer,
        update_buffers=off.gradients + off.buffers if policy.updates_on_device else 0,
        scales=_delayed_scales(layout.config.training, linears),
    )


def gathered_bytes(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of the gathered copies that exist at once while a stage computes, and of a shard that
    is fetched from the host for that.

    What is gathered beside a layer are other layers, without experts that are gathered apart.
    """
    ends, *layers = stage_blocks(layout, stage, whole_embedding=policy.whole_embedding)
    largest = max((block.copied(policy) for block in layers), default=0.0)
    others = max((block.parts(policy)[1].copied(policy) for block in layers), default=0.0)
    beside = min(policy.in_flight, sum(block.count for block in layers)) - 1
    fetched = fetched_shard_bytes(layout, stage, policy)
    return ends.copied(policy) + largest + max(beside, 0) * others + fetched


def fetched_shard_bytes(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of the largest shard that is fetched from the host for a gather of a stage."""
    if not policy.offloads_weights:
        return 0.0
    blocks = stage_blocks(layout, stage, whole_embedding=policy.whole_embedding)
    parts = (part for block in blocks for part in block.parts(policy))
    return policy.compute * max(map(ShardPlace.first(layout).held, parts), default=0)


def stage_gradients(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of a stage's gradients that each step allocates and frees on the device, on the first
    of the ranks that share them."""
    whole = policy.whole_embedding
    blocks = stage_blocks(layout, stage, trained=True, whole_embedding=whole)
    if policy.splits_gradient:
        return sum(block.count * kept_reduced(layout, block, policy) for block in blocks)
    return policy.gradient * sum(block.count * block.made_anew(policy) for block in blocks)


def kept_reduced(layout: Layout, block: GatheredBlock, policy: StatePolicy) -> float:
    """Bytes of a block's gradients that a step allocates, on the device after their reduction."""
    if policy.offloaded == 1:
        block = with_replicas(layout, block)
    elif not policy.frees_gradients:
        return 0.0
    return policy.gradient * ShardPlace.first(layout).held(block)


def stage_narrow(layout: Layout, stage: StageParts, policy: StatePolicy) -> float:
    """Bytes of a stage's 8-bit weights that microbatches share, for one of the two products."""
    return policy.step_weight * sum(
        block.count * sum(block.narrow) for block in stage_blocks(layout, stage)
    )


@dataclass(frozen=True)
class _OffDevice:
    """Bytes of masters and moments that are off the device.

    Attributes:
        kept: bytes in all.
        beyond: bytes of 8-bit moments beyond those that the policy counts.
        buffers: buffers through which they pass.
        gradients: the same for their gradients.
    """

    kept: float
    beyond: float
    buffers: float
    gradients: float


def _off_device(
    at: ShardPlace, blocks: Collection[GatheredBlock], policy: StatePolicy, elements: int
) -> _OffDevice:
    """Bytes off the device for this many elements of these blocks."""
    each = policy.master + policy.moments
    beyond = sum(_beyond_of_block(at, block, policy) for block in blocks)
    number, capacity = update_buffers(elements)
    buffer = capacity * each + _beyond_of_buffer(at, blocks, policy, capacity)
    gradients = number * capacity * policy.gradient
    return _OffDevice(elements * each + beyond, beyond, number * buffer, gradients)


def _delayed_scales(training: TrainingConfig, linears: int) -> int:
    """Bytes of the delayed scales of this many 8-bit linear layers."""
    return OPERANDS * linears * delayed_bytes(training) if training.delays_scales else 0


def _offloaded_weights(layout: Layout, pp_rank: int, policy: StatePolicy) -> tuple[float, float]:
    """Bytes of a rank's weights that are not on the device, padded, and of the most gathered at
    once."""
    if not policy.offloads_weights:
        return 0.0, 0.0
    first = ShardPlace.first(layout)
    blocks = units_on_host(layout, pp_rank).values()
    parts = [replace(b, dense=()) for b in blocks] + [replace(b, experts=()) for b in blocks]
    sizes = [first.held(part) * policy.compute for part in parts]
    return sum(sizes), max(sizes, default=0.0)


def _second_copy(layout: Layout, block: GatheredBlock, policy: StatePolicy) -> float:
    """Bytes of a rank's part of its node's second copy of a gathered block, in the type in which it
    was sent (hpZ)."""
    rounded, gathers_8_bits = policy.unpacking > 0, layout.config.training.fp8_param_gather
    narrow = block.narrow if gathers_8_bits else (0, 0)
    each = zip((block.dense, block.experts), narrow, layout.node_sizes, strict=True)
    return sum(
        UnitSizes.whole(shapes, few).gathered(policy.compute, rounded=rounded) / nodes.hpz
        for shapes, few, nodes in each
        if nodes.hpz > 1
    )


def _beyond_of_block(at: ShardPlace, block: GatheredBlock, policy: StatePolicy) -> float:
    """Bytes of a block's moments in addition to `policy.moments`: scales of 8-bit moments, and with
    Muon second moments."""
    if policy.muon:
        return policy.wide * (at.held(block) - at.held(block.matrices))
    return sum(beyond(shape, size, policy) for shape, size in at.parts(block))


def _beyond_of_buffer(
    at: ShardPlace, blocks: Collection[GatheredBlock], policy: StatePolicy, elements: int
) -> float:
    """The same for a buffer through which the state of some blocks passes."""
    if not (blocks and policy.eight_bit):
        return 0.0
    pairs = [part for block in blocks for part in at.parts(block)]
    vectors = buffer_size(elements, ((size, size * (len(shape) == 1)) for shape, size in pairs))
    numbers = buffer_size(elements, ((size, size * (len(shape) > 1)) for shape, size in pairs))
    scales = buffer_size(elements, ((size, _moment_scales(shape, size)) for shape, size in pairs))
    buffer = numbers + scales + policy.wide * vectors
    return policy.eight_bit * (buffer - elements * (1 + 1 / BLOCK))


def beyond(shape: tuple[int, ...], size: int, policy: StatePolicy) -> float:
    """Bytes of a parameter's moments in addition to `policy.moments`, for `size` of its elements.

    A row that ends within a block has a scale for the rest, and vectors keep their type.
    """
    if not policy.eight_bit:
        return 0.0
    each = policy.wide * size if len(shape) == 1 else size + _moment_scales(shape, size)
    return policy.eight_bit * (each - size * (1 + 1 / BLOCK))


def _moment_scales(shape: tuple[int, ...], size: int) -> int:
    """Number of scales of an 8-bit moment, for `size` elements of a parameter of this shape."""
    return size // shape[-1] * -(-shape[-1] // BLOCK) if len(shape) > 1 else 0


def with_replicas(layout: Layout, block: GatheredBlock) -> GatheredBlock:
    """Parameters of a block of which other ranks reduce the same shard. Their gradients do not
    leave for the host at once: on the device they are summed over microbatches until replicas add
    theirs, and FSDP2 keeps what these have added until the step's backwards are over."""
    grid = layout.grid
    return replace(
        block,
        dense=block.dense if grid.dp_replicate > 1 else (),
        experts=block.experts if grid.edp > num_expert_shards(layout) else (),
    )


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
