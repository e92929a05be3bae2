"""Groups for the messages between neighbours of a pipeline, without any process."""

from typing import Any
from unittest.mock import patch

import pytest

from fivefold.mesh import groups
from fivefold.mesh.grid import Grid
from fivefold.mesh.groups import build_groups, neighbours_by_round
from fivefold.mesh.nodes import NodeSizes


@pytest.mark.parametrize("ranks", range(1, 12))
def test_neighbours_meet_in_one_round(ranks: int) -> None:
    rounds = [neighbours_by_round(ranks, here) for here in range(ranks)]
    assert len({len(of_rank) for of_rank in rounds}) == 1
    for here, others in enumerate(rounds):
        assert all(o is None or rounds[o][r] == here for r, o in enumerate(others))
        met = [other for other in others if other is not None]
        assert sorted(met) == sorted({(here + 1) % ranks, (here - 1) % ranks} - {here})


@pytest.mark.parametrize("ranks", range(1, 9))
def test_both_ends_make_their_groups_in_the_same_place(ranks: int) -> None:
    """As torch wants it, which names a group after its ranks and how many were made before."""
    pp_ranks = tuple(range(3, 3 + 2 * ranks, 2))
    made: list[list[tuple[int, ...]]] = []

    def new_group(members: tuple[int, ...], *, urgent: bool = False) -> Any:
        made[-1].append(tuple(members))
        return tuple(members)

    with patch.object(groups, "new_group", new_group):
        for here in range(ranks):
            made.append([])
            lines = groups._lines(pp_ranks, here)
            for source, target in lines:
                assert lines[source, target] == tuple(sorted((pp_ranks[source], pp_ranks[target])))
                assert (target, source) in lines and here in (source, target)
    assert len({len(of_rank) for of_rank in made}) == 1
    for place in range(len(made[0])):
        for here, of_rank in enumerate(made):
            members = of_rank[place]
            assert pp_ranks[here] in members
            assert all(made[pp_ranks.index(other)][place] == members for other in members)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        (Grid(pp=3, dp_shard=2, tp=2), {"sharded": True, "tied_ranks": [(0, 2)]}),
        (Grid(pp=4, dp_replicate=2), {"sharded": False, "tied_ranks": [(0, 1, 3)]}),
        (
            Grid(pp=4, dp_shard=2, cp=4, ep=2, etp=2),
            {
                "sharded": True,
                "tied_ranks": [(0, 1), (2, 3)],
                "mirrored": True,
                "cp_sizes": (2, 2),
                "expert_shards": 2,
                "nodes": (NodeSizes(2, 2), NodeSizes(1, 1)),
            },
        ),
        (Grid(pp=2, tp=2, ep=2), {"sharded": False, "tied_ranks": [(0, 1)], "expert_shards": 1}),
    ],
)
def test_each_group_is_made_by_all_of_its_ranks_at_once(
    grid: Grid, options: dict[str, Any]
) -> None:
    """Every rank makes as many, the n-th at the same time as its members: on GPUs torch splits the
    communicator of all ranks, which all must take part in, each for its own group."""
    made: list[list[tuple[int, ...]]] = []

    def new_group(ranks: tuple[int, ...], *, urgent: bool = False) -> Any:
        made[-1].append(tuple(ranks))
        return tuple(ranks)

    with (
        patch.object(groups, "new_group", new_group),
        patch.object(groups, "_as_on_gpus", lambda: True),
        patch.object(groups.DeviceMesh, "from_group", lambda *_, **__: None),
    ):
        for rank in range(grid.world_size):
            made.append([])
            build_groups(grid, rank, "cuda", **options)
    assert len({len(of_rank) for of_rank in made}) == 1
    for rank, of_rank in enumerate(made):
        for place, members in enumerate(of_rank):
            assert rank in members
            assert all(made[other][place] == members for other in members)
