"""Creates the process groups of one rank from the grid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.mesh.device import REHEARSED_GPUS
from fivefold.mesh.gloo_loops import lower_loop_priority
from fivefold.mesh.grid import EXPERT_AXES, Grid
from fivefold.mesh.nodes import NodeSizes, parts_of
from fivefold.mesh.shared_gpu import SHARED_GPU

PARAMETER_AXES = ("dp_replicate", "dp_shard_cp", "tp")
EXPERT_PARAMETER_AXES = ("edp_replicate", "edp_shard", "ep", "etp")

_CONNECTION_LOST = (  # texts of gloo's RuntimeError when another rank is gone or silent
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
)


def new_group(
    ranks: Sequence[int] | None = None, *, backend: str | None = None, urgent: bool = False
) -> dist.ProcessGroup:
    """Create a group with the timeout of the world's group.

    torch would give each new group its default of half an hour.

    Args:
        ranks: members of the group, the only ranks that take part; None: every rank.
        backend: backend as in torch; None: that of the world's group for tensors, without gloo for
            objects on GPUs, whose connections every rank would hold open for each group.
        urgent: whether the computation waits for its messages: on CUDA they get a stream of high
            priority, so that their kernels start before those of gradients.
    """
    world = dist.group.WORLD
    assert world is not None, "the world's group comes first"
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    options = None
    if backend is None and uses_nccl():
        backend = "nccl"
    if urgent and uses_nccl():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    return dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=ranks is not None,
    )


def uses_nccl() -> bool:
    """Whether NCCL moves the tensors on GPUs."""
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def _as_on_gpus() -> bool:
    """Whether groups behave like NCCL's on GPUs."""
    config = dist.get_backend_config()
    return uses_nccl() or SHARED_GPU in config or REHEARSED_GPUS in config


def lost_connection(error: BaseException) -> bool:
    """Whether `error` only means that another rank is gone or does not answer."""
    if isinstance(error, ConnectionError | dist.DistError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in message for s in _CONNECTION_LOST)


@dataclass(frozen=True)
class NodeGroups:
    """The groups of ZeRO++ among the ranks that share the state of a parameter, None if undivided.

    Attributes:
        hpz: ranks of a node that gather the weights of a step from each other.
        qgz_inner: ranks of a node that sum gradients first.
        qgz_outer: ranks, one of each node, that sum these sums.
    """

    hpz: dist.ProcessGroup | None
    qgz_inner: dist.ProcessGroup | None
    qgz_outer: dist.ProcessGroup | None


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank; a group of one rank is None.

    Attributes:
        grid: sizes of the mesh axes.
        rank: number of this process among all ranks.
        world: group of all ranks.
        pp: group of the ranks that hold the stages of this replica.
        pp_lines: groups of two neighbours in the pipeline, by the pipeline ranks of sender and
            receiver, where the messages of a group would run in turn; else empty.
        tp: group of the ranks that hold the parts of the same matrices.
        data: group of the ranks that see other tokens of the same batch (DP x CP).
        cp: group of the ranks that hold the parts of the same sequences.
        cp_inner: subgroup of `cp` that exchanges heads for tokens in hierarchical attention.
        cp_outer: subgroup of `cp` that forms the ring in hierarchical attention.
        tied: group of the pipeline ranks that hold copies of the embedding, if several do.
        mirror: group of the two pipeline ranks that hold the same stages, if the pipeline holds two
            copies of the model.
        mesh: [dp_replicate, dp_shard_cp, tp] mesh of this pipeline rank, on which parameters are
            laid out; without sharding all ranks of DP x CP are replicas.
        nodes: groups of ZeRO++ for dense parameters.
        holders: group of the ranks that hold the parts of the same matrices and of their state, in
            the order of shards, then of parts; None also if nobody asks for it.
        experts: groups that a model with experts needs in addition; None without experts.
    """

    grid: Grid
    rank: int
    world: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    pp_lines: Mapping[tuple[int, int], dist.ProcessGroup]
    tp: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    cp_inner: dist.ProcessGroup | None
    cp_outer: dist.ProcessGroup | None
    tied: dist.ProcessGroup | None
    mirror: dist.ProcessGroup | None
    mesh: DeviceMesh
    nodes: NodeGroups
    holders: dist.ProcessGroup | None
    experts: "ExpertGroups | None"

    @property
    def at(self) -> dict[str, int]:
        """The coordinates of this rank on the attention mesh."""
        return self.grid.coordinates(self.rank)

    @cached_property
    def tp_mesh(self) -> DeviceMesh | None:
        """The 1-D mesh of tensor parallelism; None if it has one rank."""
        return self.mesh["tp"] if self.tp is not None else None


@dataclass(frozen=True)
class ExpertGroups:
    """The process groups that one rank uses for experts; a group of one rank is None.

    Attributes:
        ep: group of the ranks that hold different experts.
        etp: group of the ranks that hold the parts of this rank's experts.
        both: group of all ranks of `ep` and `etp` together.
        edp: group of the ranks that hold the same experts and get different tokens for them.
        microbatch: group of the ranks that share the tokens of a microbatch (CP x TP).
        stage: group of all ranks with different tokens of the same layers (DP x CP x TP).
        mesh: [edp_replicate, edp_shard, ep, etp] mesh of this pipeline rank, on which expert
            parameters are laid out; without sharding all of EDP are replicas.
        nodes: groups of ZeRO++ for experts.
        holders: as in `Groups`, of this rank's experts.
    """

    ep: dist.ProcessGroup | None
    etp: dist.ProcessGroup | None
    both: dist.ProcessGroup | None
    edp: dist.ProcessGroup | None
    microbatch: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None
    mesh: DeviceMesh
    nodes: NodeGroups
    holders: dist.ProcessGroup | None

    @cached_property
    def split_mesh(self) -> DeviceMesh | None:
        """The 2-D mesh over which experts are split; None if each rank holds all of them whole."""
        return self.mesh["ep", "etp"] if self.both is not None else None


def build_groups(
    grid: Grid,
    rank: int,
    device_type: str,
    *,
    sharded: bool,
    expert_shards: int | None = None,
    cp_sizes: tuple[int, ...] = (),
    tied_ranks: Sequence[tuple[int, ...]] = (),
    mirrored: bool = False,
    nodes: tuple[NodeSizes, NodeSizes] = (NodeSizes(), NodeSizes()),
    holders: bool = False,
) -> Groups:
    """Create the groups of this rank.

    Only the members of a group take part in its creation, so that this scales to thousands of
    ranks.

    Args:
        grid: grid of all ranks.
        rank: number of this process.
        device_type: "cpu" or "cuda".
        sharded: whether dp_shard x cp splits anything; otherwise these ranks are replicas.
        expert_shards: number of ranks that share the state of an expert's parameter; None without
            experts.
        cp_sizes: sizes of the inner and outer groups of hierarchical context parallelism; empty if
            it is not hierarchical.
        tied_ranks: sets of pipeline ranks, each of which holds copies of the embedding.
        mirrored: whether the pipeline holds a second copy of the model, in reverse.
        nodes: how ZeRO++ divides the sharding groups of dense parameters, and of experts.
        holders: whether matrices are put together from their parts.
    """
    made = _Made()
    pp_ranks = grid.group_of(rank, ("pp",))
    cp_ranks = grid.group_of(rank, ("cp",))
    inner, outer = parts_of(cp_ranks, rank, cp_sizes[0]) if cp_sizes else ((), ())
    here = grid.coordinates(rank)["pp"]
    tied = _tied(pp_ranks, here, tied_ranks, made)
    pair = sorted((pp_ranks[here], pp_ranks[-1 - here]))
    replicas = ("dp_replicate",) if sharded else ("dp_replicate", "dp_shard", "cp")
    meshed = (replicas, ("dp_shard", "cp") if sharded else (), ("tp",))
    every = (grid.group_of(rank, axes) for axes in meshed)
    along = dict(zip(PARAMETER_AXES, every, strict=True))
    groups = Groups(
        grid=grid,
        rank=rank,
        world=dist.group.WORLD if grid.world_size > 1 else None,
        pp=made.unless_alone(pp_ranks, urgent=True),
        pp_lines=_lines(pp_ranks, here) if _as_on_gpus() else {},
        tp=made.unless_alone(grid.group_of(rank, ("tp",)), urgent=True),
        data=made.unless_alone(grid.group_of(rank, ("dp_replicate", "dp_shard", "cp"))),
        cp=_apart(cp_ranks),
        cp_inner=_apart(inner),
        cp_outer=_apart(outer),
        tied=tied,
        mirror=made.group(tuple(pair)) if mirrored else None,
        mesh=_mesh(grid, rank, device_type, made, along),
        nodes=_node_groups(grid.group_of(rank, ("dp_shard", "cp")), rank, nodes[0]),
        holders=made.unless_alone(grid.holders(rank, sharded=sharded)) if holders else None,
        experts=None
        if expert_shards is None
        else _expert_groups(grid, rank, device_type, expert_shards, made, nodes[1], holders),
    )
    lower_loop_priority()
    return groups


def _tied(
    pp_ranks: tuple[int, ...], here: int, tied_ranks: Sequence[tuple[int, ...]], made: "_Made"
) -> dist.ProcessGroup | None:
    """The group of the pipeline ranks that hold copies of the embedding with this one."""
    sharing = next((ranks for ranks in tied_ranks if here in ranks), None)
    if sharing is not None:
        return made.group(tuple(pp_ranks[i] for i in sharing))
    if tied_ranks:
        # torch names a group after its ranks and how many groups each has made before. Ranks
        # without a tied embedding make one as well, or the next common group would hang.
        new_group((pp_ranks[here],))
    return None


def _expert_groups(
    grid: Grid,
    rank: int,
    device_type: str,
    shards: int,
    made: "_Made",
    nodes: NodeSizes,
    holders: bool,
) -> ExpertGroups:
    def among(*axes: str) -> tuple[int, ...]:
        return grid.group_of(rank, axes, EXPERT_AXES)

    stage = grid.group_of(rank, ("dp_replicate", "dp_shard", "cp", "tp"))
    ep, etp, both, edp = among("ep"), among("etp"), among("ep", "etp"), among("edp")
    ep_group = _apart(ep)  # separate, so that tokens do not wait for gradients
    etp_group = _apart(etp)
    both_group = _apart(both) if len(ep) > 1 and len(etp) > 1 else ep_group or etp_group
    place = edp.index(rank) % shards
    sharing = grid.expert_shard_ranks(rank, shards)
    along = dict(zip(EXPERT_PARAMETER_AXES, (edp[place::shards], sharing, ep, etp), strict=True))
    return ExpertGroups(
        ep=ep_group,
        etp=etp_group,
        both=both_group,
        edp=made.unless_alone(edp),
        microbatch=_apart(grid.group_of(rank, ("cp", "tp"))),
        stage=_apart(stage),
        mesh=_mesh(grid, rank, device_type, made, along),
        nodes=_node_groups(sharing, rank, nodes),
        holders=made.unless_alone(grid.expert_holders(rank, shards)) if holders else None,
    )


def _node_groups(ranks: tuple[int, ...], rank: int, sizes: NodeSizes) -> NodeGroups:
    """ZeRO++'s groups within and between nodes; separate groups, so that messages are not confused
    with others."""
    hpz = qgz_inner = qgz_outer = None
    if sizes.hpz > 1:
        hpz = new_group(parts_of(ranks, rank, sizes.hpz)[0])
    if sizes.qgz > 1:
        qgz_inner, qgz_outer = map(new_group, parts_of(ranks, rank, sizes.qgz))
    return NodeGroups(hpz, qgz_inner, qgz_outer)


class _Made:
    """Created groups by their ranks; axes with the same ranks share a group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(self, ranks: tuple[int, ...], *, urgent: bool = False) -> dist.ProcessGroup:
        """The group of these ranks; `urgent` is decided by the first caller."""
        if ranks not in self._groups:
            self._groups[ranks] = new_group(ranks, urgent=urgent)
        return self._groups[ranks]

    def unless_alone(
        self, ranks: tuple[int, ...], *, urgent: bool = False
    ) -> dist.ProcessGroup | None:
        """The group of these ranks; None if there is only one."""
        return self.group(ranks, urgent=urgent) if len(ranks) > 1 else None


def _apart(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A separate group, whose messages never wait for gradients."""
    return new_group(ranks, urgent=True) if len(ranks) > 1 else None


def _lines(pp_ranks: tuple[int, ...], here: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each direction between this pipeline rank and each of its neighbours.

    NCCL runs the messages of a communicator in turn, so that a receive would hold up the sends
    behind it. The last rank is a neighbour of the first, as in schedules that go round.
    """
    lines = {}
    for other in neighbours_by_round(len(pp_ranks), here):
        if other is None:  # all ranks make equally many groups, see `build_groups`
            new_group((pp_ranks[here],))
            new_group((pp_ranks[here],))
            continue
        low, high = sorted((here, other))
        pair = pp_ranks[low], pp_ranks[high]
        lines[low, high] = new_group(pair, urgent=True)
        lines[high, low] = new_group(pair, urgent=True)
    return lines


def neighbours_by_round(ranks: int, here: int) -> list[int | None]:
    """A rank's neighbour in a ring of `ranks`, or None, in each of up to three rounds.

    Every two neighbours meet in exactly one round, and no rank meets two in the same round. If all
    ranks follow the rounds in turn, no chain of ranks waits for one another.
    """
    if ranks < 3:
        return [1 - here] * (ranks - 1)
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]
    even = ring[: ranks - ranks % 2]
    rounds = [even[::2], even[1::2], *([ring[-1:]] if ranks % 2 else [])]
    return [next((sum(edge) - here for edge in edges if here in edge), None) for edges in rounds]


def _mesh(
    grid: Grid, rank: int, device_type: str, made: _Made, along: Mapping[str, tuple[int, ...]]
) -> DeviceMesh:
    """The mesh of one pipeline rank's parameters, from existing groups.

    Args:
        grid: grid of all ranks.
        rank: number of this process.
        device_type: as of `build_groups`.
        made: the groups.
        along: name of each axis of the mesh, and the ranks that differ from this one along it only.
    """
    first = grid.coordinates(rank)["pp"] * grid.ranks_per_stage
    ranks = torch.arange(first, first + grid.ranks_per_stage)
    return DeviceMesh.from_group(
        [made.group(part) for part in along.values()],
        device_type,
        mesh=ranks.view([len(part) for part in along.values()]),
        mesh_dim_names=tuple(along),
    )
