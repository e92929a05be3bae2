"""Bytes that a rank sends to gather weights and to reduce gradients, in closed form; torch-free.

With P ranks that share state, of which n lie in a node, and a message of m bytes from one to
another: a gather over all sends (P-1) m, one within the node (hpZ) (n-1)/n P m; a reduction by
all-to-all (P-1) m at once, or (n-1) P/n m in the node and (P/n - 1) m between nodes (qgZ).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.matrices import Matrix, MatrixAssignment, layer_matrices
from fivefold.counts.messages import Flow, wire_bytes
from fivefold.counts.parameters import parameter_records
from fivefold.counts.shards import held, num_expert_shards, num_shards
from fivefold.counts.units import unit_of
from fivefold.data_parallel.blocks import GRADIENT_BITS, UnitSizes
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES
from fivefold.model.eight_bit.rules import num_scales
from fivefold.pipeline.ir import Kind


class ShardedVolumes:
    """What the data-parallel ranks of a layout send, for one of them."""

    def __init__(self, layout: Layout, rank: int) -> None:
        config = layout.config
        self.layout, self.parallel, self.rank = layout, config.parallel, rank
        self.slices = self.parallel.num_sequence_slices
        # Each copy of the model takes its share of the microbatches.
        self.microbatches = layout.num_microbatches // layout.num_copies
        self.element = ELEMENT_BYTES[config.training.precision]
        self.gradient, self.wire = config.gradient_bytes, config.sent_gradient_bytes
        self.records = parameter_records(layout, rank)

    def dense(self) -> Iterator[Flow]:
        """Parameter gathers and gradient reductions, including the padding of uneven shards.

        With d shards of c-byte copies and g-byte gradients, and rho = (d-1)/d: rho times
        (g + c) Psi for ZeRO-1, (M g + c) Psi for ZeRO-2, M (2c + g) Psi for ZeRO-3. The r replicas
        of a shard then all-reduce it, 2 (r-1)/r g Psi / d; without sharding all ranks do (d = 1).
        """
        shards, grid = num_shards(self.layout), self.layout.grid
        replicas = grid.dp * grid.cp // shards
        axes = (
            "data" if replicas == 1 else "dp_shard_cp",
            "data" if shards == 1 else "dp_replicate",
        )
        yield from self._sharded("data", "parameters", axes, shards, replicas)

    def experts(self) -> Iterator[Flow]:
        """Like `dense`, over the ranks that hold the same experts; nothing without experts."""
        if self.layout.config.model.num_experts is None:
            return  # a list of many ranks takes minutes
        ranks = self.layout.grid.group_of(self.rank, ("edp",), EXPERT_AXES)
        shards = num_expert_shards(self.layout)
        sharing = self.layout.grid.expert_shard_ranks(self.rank, shards)
        replicas = ranks[ranks.index(self.rank) % shards :: shards]
        axes = self._axis(sharing, "edp_shard"), self._axis(replicas, "edp_replicate")
        yield from self._sharded("edp", "experts", axes, shards, len(ranks) // shards)

    def orthogonalised(self) -> Iterator[Flow]:
        """Parts of the matrices that other ranks put together for Muon, and of what comes back.

        Where updated blocks are gathered at once, each assigns its own.
        """
        layout, grid = self.layout, self.layout.grid
        early = self.parallel.overlap_param_gather_with_optimizer_step
        stages = {record.name: record.stage for record in self.records}
        for experts, (number, matrices) in layer_matrices(layout, self.records).items():
            together: defaultdict[tuple[int, str] | None, list[Matrix]] = defaultdict(list)
            for matrix in matrices:
                unit = (stages[matrix.name], unit_of(matrix.name)) if early else None
                together[unit].append(matrix)
            assignments = [MatrixAssignment.of(each, number) for each in together.values()]
            if not any(assignment.rounds for assignment in assignments):
                continue
            if experts:
                ranks = grid.expert_holders(self.rank, num_expert_shards(layout))
                axis = self._axis(ranks, "edp_shard" if grid.etp == 1 else "edp_holders")
            else:
                ranks = grid.holders(self.rank, sharded=num_shards(layout) > 1)
                axis = self._axis(ranks, "holders")
            place = ranks.index(self.rank)
            wide = layout.config.master_bytes
            narrow = ELEMENT_BYTES[layout.config.training.muon_precision]
            size = sum(d.gathered(place) * wide + d.returned(place) * narrow for d in assignments)
            yield Flow(axis, "parts of experts for Muon" if experts else "parts for Muon", size)

    def _axis(self, ranks: tuple[int, ...], name: str) -> str:
        """The first axis whose group has exactly these ranks."""
        grid = self.layout.grid
        named = {
            "tp": ("tp",),
            "data": ("dp_replicate", "dp_shard", "cp"),
            "dp_replicate": ("dp_replicate",),
            "dp_shard_cp": ("dp_shard", "cp"),
        }
        for axis, over in named.items():
            if grid.group_of(self.rank, over) == ranks:
                return axis
        if self.layout.config.model.num_experts is None:
            return name
        shards = num_expert_shards(self.layout)
        edp = grid.group_of(self.rank, ("edp",), EXPERT_AXES)
        of_experts = {
            "edp": edp,
            "edp_replicate": edp[edp.index(self.rank) % shards :: shards],
            "edp_shard": grid.expert_shard_ranks(self.rank, shards),
            "ep": grid.group_of(self.rank, ("ep",), EXPERT_AXES),
            "etp": grid.group_of(self.rank, ("etp",), EXPERT_AXES),
            "holders": grid.holders(self.rank, sharded=num_shards(self.layout) > 1),
        }
        return next((axis for axis, those in of_experts.items() if those == ranks), name)

    def _sharded(
        self, group: str, what: str, axes: tuple[str, str], shards: int, replicas: int
    ) -> Iterator[Flow]:
        """Gathers and reductions of the parameters whose gradients `group` sums first.

        Args:
            group: name of the group in the parameter records.
            what: description of the parameters.
            axes: axis of the ranks that share state, and of those that hold replicas.
            shards: number of ranks that share state.
            replicas: number of replicas.
        """
        sharding, of = self.parallel.sharding, self._unit_sizes(group, shards)
        trained = self._unit_sizes(group, shards, trained=True)
        padded = sum(sizes.blocks + sizes.wide for sizes in trained.values())
        scales = self._num_scales(group)
        yield Flow(axes[0], f"scales of {what}", wire_bytes("all_reduce", 4 * scales, shards))
        nodes = self.layout.node_sizes[group == "edp"]
        prefix = "edp_" if group == "edp" else ""
        often = self.gathers()
        yield from gathers(
            [
                (often[stage] * self._in_turn(group, unit), sizes)
                for (stage, unit), sizes in of.items()
            ],
            (axes[0], f"{prefix}hpz"),
            f"gathered {what}",
            (shards, nodes.hpz),
            self.parallel.zero_quantized_weights,
            self.element,
        )
        reductions = sharding.reductions(self.microbatches * self.slices)
        if self.parallel.zero_quantized_gradients:
            names = (axes[0], f"{prefix}qgz_inner", f"{prefix}qgz_outer")
            purpose, parts = f"reduced gradients of {what}", (shards, nodes.qgz)
            yield from rounded_reductions(
                of.values(), names, purpose, parts, reductions, self.gradient
            )
        else:
            reduced = wire_bytes("reduce_scatter", shards * padded * self.wire, shards)
            yield Flow(axes[0], f"reduced gradients of {what}", reductions * reduced)
        # FSDP2 sums replicas in the reduction dtype; only our buckets and reduce-scatter narrow it.
        bucketed = not self.layout.config.gathers_weights()
        summed = padded * (self.wire if bucketed else self.gradient)
        yield Flow(
            axes[1],
            f"gradients of {what} summed over replicas",
            wire_bytes("all_reduce", summed, replicas),
        )

    def _in_turn(self, group: str, unit: str) -> int:
        """How often a run of a stage gathers a unit: experts that all MTP modules share are
        gathered for each, if they come and go."""
        model, parallel = self.layout.config.model, self.parallel
        by_program = parallel.pipeline_max_unsharded_stages is not None
        again = group == "edp" and unit.startswith("mtp.") and model.mtp_use_repeated_layer
        stays = by_program or not parallel.sharding.splits_parameters
        return 1 if stays or not again else model.mtp_num_layers

    def _unit_sizes(
        self, group: str, shards: int, *, trained: bool = False
    ) -> dict[tuple[int, str], UnitSizes]:
        """Elements of this rank's shard of each unit that is gathered at once, padded; `trained`:
        only of what is trained."""
        units: defaultdict[tuple[int, str], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        narrow: Counter[tuple[int, str]] = Counter()
        for record in self.records:
            if group in record.sums and record.trained >= trained:
                size = held(record.shape, shards)
                units[record.stage, unit_of(record.name)].append((record.shape, size))
                narrow[record.stage, unit_of(record.name)] += record.narrow * size
        return {unit: UnitSizes.of(of, narrow[unit]) for unit, of in units.items()}

    def _num_scales(self, group: str) -> int:
        """Scales on which ranks agree in a step, of the weights that are gathered in 8 bits."""
        recipe = self.layout.config.training.fp8_recipe
        if recipe == "delayed":  # which are known before
            return 0
        narrow = (record for record in self.records if record.narrow and group in record.sums)
        return sum(num_scales(record.shape, recipe) for record in narrow)

    def gathers(self) -> dict[int, int]:
        """How often each stage's parameters are gathered: by the program if it says so."""
        pp_rank = self.layout.grid.coordinates(self.rank)["pp"]
        if self.parallel.pipeline_max_unsharded_stages is None:
            sharding, recomputed = self.parallel.sharding, self.layout.recomputed()
            often = sharding.gathers(self.microbatches * self.slices)
            again = self.slices if sharding.splits_parameters else 0
            stages = self.layout.stages_of(pp_rank)
            return {stage: often + again * recomputed[stage] for stage in stages}
        acts = self.layout.program().ranks[pp_rank]
        return Counter(act.stage for act in acts if act.kind is Kind.UNSHARD)


def gathers(
    units: Sequence[tuple[int, UnitSizes]],
    axes: tuple[str, str],
    purpose: str,
    ranks: tuple[int, int],
    rounded: bool,
    element: int,
) -> Iterator[Flow]:
    """The gathers of a step: the first one of a unit over all ranks, others perhaps in the node.

    Args:
        units: how often each is gathered, and the elements of a rank's shard.
        axes: axis of all ranks that share the state, and of those in a node.
        purpose: description of what is gathered.
        ranks: number of these ranks; 1 in a node: every gather is over all of them.
        rounded: whether weights are sent as INT8 (qwZ).
        element: bytes of a weight in the compute type.
    """
    shards, node = ranks
    everywhere = inside = 0.0
    for often, sizes in units:
        whole = shards * sizes.gathered(element, rounded=rounded)
        first = min(often, 1) if node > 1 else often
        everywhere += first * wire_bytes("all_gather", whole, shards)
        inside += (often - first) * wire_bytes("all_gather", whole, node)
    yield Flow(axes[0], purpose, everywhere)
    yield Flow(axes[1], purpose, inside)


def rounded_reductions(
    units: Iterable[UnitSizes],
    axes: tuple[str, str, str],
    purpose: str,
    ranks: tuple[int, int],
    often: int,
    element: int,
) -> Iterator[Flow]:
    """The reductions of a step as INT4 (qgZ).

    Args:
        units: elements of a rank's shard of each unit.
        axes: axis of all ranks that share the state, of those in a node, and of those between.
        purpose: description of what is reduced.
        ranks: number of all these ranks, and of those in a node; 1: one all-to-all among all.
        often: reductions of a unit in a step.
        element: bytes of a gradient that is not rounded.
    """
    shards, node = ranks
    message = sum(sizes.message(GRADIENT_BITS, element) for sizes in units)
    if node == 1:
        sent = wire_bytes("all_to_all", shards * message, shards)
        yield Flow(axes[0], purpose, often * sent)
        return
    nodes = shards // node
    inside = wire_bytes("all_to_all", shards * message, node)
    yield Flow(axes[1], purpose, often * inside)
    yield Flow(axes[2], purpose, often * wire_bytes("all_to_all", nodes * message, nodes))
