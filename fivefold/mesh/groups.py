"""The process groups of one rank, built from the grid and handed to whoever needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.mesh.grid import Grid

PARAMETER_AXES = ("dp_replicate", "dp_shard_cp", "tp")

_CONNECTION_LOST = (  # what gloo says in a plain RuntimeError when another rank is gone or silent
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
)


def new_group(
    ranks: Sequence[int] | None = None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """A group that waits for its members as long as the world's group does.

    torch gives each new group its own default of half an hour, whatever the world was given.

    Args:
        ranks: its members, who alone take part and know of it; None: every rank.
        backend: as in torch; None: that of the world.
    """
    world = dist.group.WORLD
    assert world is not None, "the world's group comes first"
    return dist.new_group(
        None if ranks is None else list(ranks),
        timeout=world._get_backend(torch.device("cpu")).options._timeout,
        backend=backend,
        use_local_synchronization=ranks is not None,
    )


def lost_connection(error: BaseException) -> bool:
    """Whether `error` is only how a rank notices that another one is gone or silent."""
    if isinstance(error, ConnectionError | dist.DistError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in message for s in _CONNECTION_LOST)


@dataclass(frozen=True)
class Groups:
    """What one rank communicates over; a group of one rank is None.

    Attributes:
        grid: sizes and arithmetic of the axes.
        rank: rank of this process in the world.
        world: every rank.
        pp: the ranks that hold the other stages of this replica.
        tp: the ranks that hold the other parts of this rank's matrices.
        data: the ranks that see other tokens of the same batch (DP x CP).
        cp: the ranks that hold the other parts of this rank's sequences.
        cp_inner: those of them that exchange heads for tokens, where attention is hierarchical.
        cp_outer: those that then hold the other parts.
        tied: the pipeline ranks that hold copies of the embedding, where there are several.
        mirror: this pipeline rank and the one that holds the same stages of the other copy of the
            model, where there are two.
        mesh: [dp_replicate, dp_shard_cp, tp] of this pipeline rank, on which parameters are laid
            out; without sharding all of DP x CP counts as replicas.
    """

    grid: Grid
    rank: int
    world: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    cp_inner: dist.ProcessGroup | None
    cp_outer: dist.ProcessGroup | None
    tied: dist.ProcessGroup | None
    mirror: dist.ProcessGroup | None
    mesh: DeviceMesh

    @property
    def at(self) -> dict[str, int]:
        """This rank's coordinates on the attention mesh."""
        return self.grid.coordinates(self.rank)

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The 1-D mesh of tensor parallelism, None if it has one rank."""
        return self.mesh["tp"] if self.tp is not None else None


def build_groups(
    grid: Grid,
    rank: int,
    device_type: str,
    *,
    sharded: bool,
    cp_sizes: tuple[int, ...] = (),
    tied_ranks: Sequence[tuple[int, ...]] = (),
    mirrored: bool = False,
) -> Groups:
    """Create the groups of this rank; only their members take part, so thousands of ranks can.

    Args:
        grid: the world.
        rank: rank of this process.
        device_type: "cpu" or "cuda".
        sharded: whether dp_shard x cp splits anything; if not, those ranks are replicas.
        cp_sizes: ranks of the inner and of the outer groups of context parallelism, if it has any.
        tied_ranks: sets of pipeline ranks, each of which holds copies of the embedding.
        mirrored: whether the pipeline holds a second copy of the model, in reverse.
    """
    made = _Made()
    tp_ranks = grid.group_of(rank, ("tp",))
    data_ranks = grid.group_of(rank, ("dp_replicate", "dp_shard", "cp"))
    pp_ranks = grid.group_of(rank, ("pp",))
    cp_ranks = grid.group_of(rank, ("cp",))
    inner, outer = _hierarchy(cp_ranks, rank, cp_sizes)
    here = grid.coordinates(rank)["pp"]
    tied = None
    sharing = next((ranks for ranks in tied_ranks if here in ranks), None)
    if sharing is not None:
        tied = made.group(tuple(pp_ranks[i] for i in sharing))
    elif tied_ranks:
        # torch names a group after its ranks and the number of groups that each has made before:
        # ranks without a tied embedding make one as well, or the next common group would hang.
        new_group((rank,))
    pair = sorted((pp_ranks[here], pp_ranks[-1 - here]))
    return Groups(
        grid=grid,
        rank=rank,
        world=dist.group.WORLD if grid.world_size > 1 else None,
        pp=made.unless_alone(pp_ranks),
        tp=made.unless_alone(tp_ranks),
        data=made.unless_alone(data_ranks),
        cp=_apart(cp_ranks),
        cp_inner=_apart(inner),
        cp_outer=_apart(outer),
        tied=tied,
        mirror=made.group(tuple(pair)) if mirrored else None,
        mesh=_parameter_mesh(grid, rank, device_type, sharded, made.group),
    )


class _Made:
    """Groups that several axes may share: the same ranks get the same group."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Of these ranks."""
        if ranks not in self._groups:
            self._groups[ranks] = new_group(ranks)
        return self._groups[ranks]

    def unless_alone(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Of these ranks, if there are several."""
        return self.group(ranks) if len(ranks) > 1 else None


def _apart(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A group that is not shared: what attention sends must not wait for gradients' messages."""
    return new_group(ranks) if len(ranks) > 1 else None


def _hierarchy(
    cp_ranks: tuple[int, ...], rank: int, sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The inner group of a rank, of neighbours, and the outer one, of those in the same place."""
    if not sizes:
        return (), ()
    group, place = divmod(cp_ranks.index(rank), sizes[0])
    return cp_ranks[group * sizes[0] : (group + 1) * sizes[0]], cp_ranks[place :: sizes[0]]


def _parameter_mesh(
    grid: Grid,
    rank: int,
    device_type: str,
    sharded: bool,
    group: Callable[[tuple[int, ...]], dist.ProcessGroup],
) -> DeviceMesh:
    """The mesh of one pipeline rank's parameters, made of groups that exist already."""
    replicas = ("dp_replicate",) if sharded else ("dp_replicate", "dp_shard", "cp")
    shards = ("dp_shard", "cp") if sharded else ()
    shape = [len(grid.group_of(rank, axes)) for axes in (replicas, shards, ("tp",))]
    first = grid.coordinates(rank)["pp"] * grid.ranks_per_stage
    ranks = torch.arange(first, first + grid.ranks_per_stage).view(shape)
    return DeviceMesh.from_group(
        [group(grid.group_of(rank, axes)) for axes in (replicas, shards, ("tp",))],
        device_type,
        mesh=ranks,
        mesh_dim_names=PARAMETER_AXES,
    )
