"""What a rank keeps from one microbatch to the next: weights, gradients, optimizer state.

How many bytes a parameter costs is a framework's policy; how many parameters a rank holds follows
from the layout alone. Planner, audit and the table of derived numbers all count here.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.training import ELEMENT_BYTES
from fivefold.layout import Layout
from fivefold.model.description import layer_kind
from fivefold.model.shape import StageParts, WholeModel, layer_weights, stage_weights


@dataclass(frozen=True)
class StatePolicy:
    """Bytes that a framework keeps per parameter, and which of them data-parallel ranks split.

    Attributes:
        copy: bytes of a weight's copy in the compute type beside its master; 0 if the master
            computes.
        gradient: bytes of an accumulated gradient.
        master: bytes of the weight that the optimizer updates.
        moments: bytes of the optimizer's moments, all together.
        splits_copy: copies exist only while their block computes (ZeRO-3).
        splits_gradient: gradients are reduced to their shard in every microbatch (ZeRO-2, 3).
        splits_optimizer: master and moments are sharded (ZeRO-1, 2, 3).
        fresh: bytes of a weight's gradient before it is added to the accumulated one; 0 if the
            multiplication adds to that at once.
        placeholder: bytes of an empty gradient that is kept for each distinct weight of a layer.
        reducing: bytes of the gradients of a layer that are being reduced while the next one
            computes.
        in_flight: layers whose copies are held at once where they are split: one that computes,
            and those that arrive. The ends of a stage are held as long as it runs.
        compute: bytes of a weight in the compute type.
        offloaded: share of the parameters whose master and moments are in host memory, with room
            there for the gradient that updates them; the device keeps them in the compute type.
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

    @property
    def device_masters(self) -> float:
        """Bytes of masters that stay on the device, of a parameter on average."""
        return (1 - self.offloaded) * self.master

    @property
    def device_moments(self) -> float:
        """Bytes of moments that stay on the device, of a parameter on average."""
        return (1 - self.offloaded) * self.moments

    @property
    def device_stand_ins(self) -> float:
        """Bytes, of a parameter on average, in the compute type for a master that is offloaded;
        none where a copy computes anyway, and stays."""
        return self.offloaded * self.compute if self.splits_copy or not self.copy else 0.0

    @property
    def host(self) -> float:
        """Bytes in host memory, of a parameter on average."""
        return self.offloaded * (self.master + self.moments + self.gradient)


def engine_policy(config: Config) -> StatePolicy:
    """Fivefold's own: masters and gradients in at least fp32, copies in the compute type."""
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
    )


def megatron_policy(splits_optimizer: bool) -> StatePolicy:
    """Megatron-LM's in bf16: gradients accumulate in fp32 inside the multiplication.

    Autograd is then given an empty gradient: of the output layer made anew each time, of the
    layers' weights kept by Transformer Engine, one for each shape.
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
    """Bytes that a rank keeps from one microbatch to the next, activations apart; on the device,
    unless it says otherwise.

    Attributes:
        parameters: parameters that the rank is responsible for, after tensor and pipeline
            parallelism.
        masters: weights that the optimizer updates.
        copies: copies of weights, in the compute type, that stay.
        gradients: gradients that are accumulated.
        optimizer: the moments.
        gathered: copies of layers, and of a stage's ends, gathered to compute and freed after it.
        host: bytes in host memory: masters and moments that are offloaded, and room for their
            gradients.
    """

    parameters: int
    masters: float
    copies: float
    gradients: float
    optimizer: float
    gathered: float
    host: float = 0.0

    @property
    def weights(self) -> float:
        """Masters, and copies that stay."""
        return self.masters + self.copies

    @property
    def total(self) -> float:
        """All of it that is on the device."""
        return self.weights + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class GatheredBlock:
    """Parameters that are gathered together: a layer, with what stands around it where it predicts
    a further token, or the ends of the model in a stage.

    Attributes:
        dense: local shapes of those on the attention mesh, after tensor parallelism.
        experts: local shapes of those on the expert mesh, after expert and tensor parallelism.
        count: how many such blocks the stage has.
    """

    dense: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]
    count: int = 1

    @property
    def size(self) -> int:
        """Elements of one block."""
        return sum(map(prod, (*self.dense, *self.experts)))


def stage_blocks(layout: Layout, stage: StageParts) -> list[GatheredBlock]:
    """The blocks of a stage: its ends first, then predictions, then every kind of layer."""
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
    """Of the parameters of a stage whose names begin with `only`, and not with `leaves_out`."""
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
    """The stages that a pipeline rank holds, those of a second copy of the model last."""
    stages = layout.split.stages_of(pp_rank)
    if layout.num_copies == 2:
        stages += layout.split.stages_of(layout.grid.pp - 1 - pp_rank)
    return stages


def num_shards(layout: Layout) -> int:
    """Ranks that share the optimizer state of a dense parameter."""
    shared = layout.config.parallel.sharding.splits_optimizer
    return layout.grid.dp_shard * layout.grid.cp if shared else 1


def num_expert_shards(layout: Layout) -> int:
    """Ranks that share the optimizer state of an expert's parameter."""
    edp = layout.grid.edp
    return 1 if num_shards(layout) == 1 else edp // gcd(edp, layout.grid.dp_replicate)


def held(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """Elements of a parameter in one shard: FSDP2 splits rows, the last shards may be short."""
    each = -(-shape[0] // shards)
    return min(max(shape[0] - shard * each, 0), each) * prod(shape[1:])


def held_of_experts(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """As `held`, of experts: where shards divide their features and not them, they split those."""
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
    """What a rank keeps of weights, gradients and optimizer state.

    Args:
        layout: layout of the run.
        pp_rank: of the rank.
        shard: its index among those that share the state; the first one holds the most.
        policy: policy of the framework; None: of Fivefold.
        expert_shard: its index among those that share the state of experts.
    """
    policy = policy or engine_policy(layout.config)
    shards, expert_shards = num_shards(layout), num_expert_shards(layout)
    whole = gathered = own = 0
    for index in stages_held(layout, pp_rank):
        ends, *layers = stage_blocks(layout, layout.split.stages[index])
        for block in (ends, *layers):
            whole += block.count * block.size
            own += block.count * sum(held(shape, shards, shard) for shape in block.dense)
            own += block.count * sum(
                held_of_experts(shape, expert_shards, expert_shard) for shape in block.experts
            )
        largest = max((block.size for block in layers), default=0)
        gathered = max(gathered, ends.size + policy.in_flight * largest)
    optimizer = own if policy.splits_optimizer else whole
    gradients = (own if policy.splits_gradient else whole) * policy.gradient
    if policy.placeholder:
        gradients += _distinct_weights(layout, pp_rank) * policy.placeholder
    return ModelState(
        parameters=whole,
        masters=optimizer * policy.device_masters,
        copies=(0 if policy.splits_copy else whole * policy.copy)
        + optimizer * policy.device_stand_ins,
        gradients=gradients,
        optimizer=optimizer * policy.device_moments,
        gathered=gathered * policy.copy if policy.splits_copy else 0,
        host=optimizer * policy.host,
    )


def _distinct_weights(layout: Layout, pp_rank: int) -> int:
    """Elements of the matrices of a rank's layers, those alike counted once."""
    model, grid = layout.config.model, layout.grid
    layers = [i for s in stages_held(layout, pp_rank) for i in layout.split.stages[s].layers]
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for layer in {layer_kind(model, i): i for i in layers}.values():
        for name, weight in layer_weights(model, layer).items():
            local = weight.local(grid.tp, grid.ep, grid.etp)
            if len(local) > 1:
                found[name, local[-2:]] = prod(local[-2:])
    return sum(found.values())
