"""The rank arithmetic, against Megatron-LM's order written out by enumeration."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.mesh.grid import ATTENTION_AXES, EXPERT_AXES, Grid

DEGREE = st.sampled_from([1, 2, 3])
QUICK = settings(max_examples=30)
MESHES = {"attention": ATTENTION_AXES, "expert": EXPERT_AXES}
MESH = st.sampled_from(sorted(MESHES))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    pp, dp_replicate, dp_shard, cp, tp = (draw(DEGREE) for _ in range(5))
    per_stage = dp_replicate * dp_shard * cp * tp
    etp = draw(st.sampled_from([n for n in range(1, 5) if per_stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, 9) if per_stage % (etp * n) == 0]))
    return Grid(pp, dp_replicate, dp_shard, cp, tp, ep, etp)


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [over for n in range(len(axes) + 1) for over in combinations(axes, n)]


@QUICK
@given(grids(), MESH)
def test_coordinates_and_ranks_are_inverse(grid: Grid, mesh: str) -> None:
    axes = MESHES[mesh]
    seen = set()
    for rank in range(grid.world_size):
        at = grid.coordinates(rank, axes)
        assert tuple(at) == axes
        assert all(0 <= at[axis] < grid.size(axis) for axis in axes)
        assert grid.rank(at, axes) == rank
        seen.add(tuple(at.values()))
    assert len(seen) == grid.world_size


@QUICK
@given(grids(), MESH, st.data())
def test_groups_partition_the_world(grid: Grid, mesh: str, data: st.DataObject) -> None:
    axes = MESHES[mesh]
    over = data.draw(st.sampled_from(_subsets(axes)))
    groups = grid.groups(over, axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        for rank in group:
            assert grid.group_of(rank, over, axes) == group
        fixed = {tuple(grid.coordinates(r, axes)[a] for a in axes if a not in over) for r in group}
        assert len(fixed) == 1


@QUICK
@given(grids())
def test_both_meshes_have_the_same_pipelines(grid: Grid) -> None:
    assert grid.groups(("pp",), ATTENTION_AXES) == grid.groups(("pp",), EXPERT_AXES)
    for rank in range(grid.world_size):
        assert grid.coordinates(rank)["pp"] == grid.coordinates(rank, EXPERT_AXES)["pp"]


def _megatron(order: str, sizes: dict[str, int], token: str) -> list[tuple[int, ...]]:
    """Megatron-LM's `RankGenerator(order).get_ranks(token)` by counting through all coordinates.

    The first name of the order varies fastest; a group holds the ranks that agree in all that the
    token does not name, in ascending order, and so do the groups.
    """
    names, varied = order.split("-"), token.split("-")
    groups: dict[tuple[int, ...], list[int]] = {}
    counting = product(*(range(sizes[name]) for name in reversed(names)))
    for rank, coordinates in enumerate(counting):
        at = dict(zip(reversed(names), coordinates, strict=True))
        groups.setdefault(tuple(at[n] for n in names if n not in varied), []).append(rank)
    return sorted(map(tuple, groups.values()))


@QUICK
@given(grids())
def test_the_groups_are_those_of_megatron(grid: Grid) -> None:
    sizes = {"tp": grid.tp, "cp": grid.cp, "ep": 1, "dp": grid.dp, "pp": grid.pp}
    dp = ("dp_replicate", "dp_shard")
    of_token = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp",), "dp": dp, "dp-cp": (*dp, "cp")}
    for token, over in (of_token | {"tp-pp": ("tp", "pp"), "tp-dp-cp": (*dp, "cp", "tp")}).items():
        assert sorted(grid.groups(over)) == _megatron("tp-cp-ep-dp-pp", sizes, token)
    sizes = {"etp": grid.etp, "ep": grid.ep, "edp": grid.edp, "pp": grid.pp}
    for token in ("etp", "ep", "edp", "pp", "etp-ep", "etp-ep-pp"):
        groups = grid.groups(tuple(token.split("-")), EXPERT_AXES)
        assert sorted(groups) == _megatron("etp-ep-edp-pp", sizes, token)


def test_megatrons_published_example() -> None:
    """16 GPUs, tensor 2, pipeline 4 (the docstring of `initialize_model_parallel`)."""
    grid = Grid(pp=4, dp_shard=2, tp=2)
    assert grid.groups(("tp",)) == tuple((r, r + 1) for r in range(0, 16, 2))
    assert set(grid.groups(("dp_shard",))) == {
        pair for first in (0, 4, 8, 12) for pair in ((first, first + 2), (first + 1, first + 3))
    }
    assert set(grid.groups(("pp",))) == {(r, r + 4, r + 8, r + 12) for r in range(4)}


@QUICK
@given(grids())
def test_data_ranks_count_replicas_then_shards(grid: Grid) -> None:
    for group in grid.groups(("dp_replicate", "dp_shard")):
        assert [grid.dp_rank(rank) for rank in group] == list(range(grid.dp))
    assert grid.edp * grid.ep * grid.etp == grid.dp * grid.cp * grid.tp


def test_ranks_are_named_by_their_coordinates() -> None:
    grid = Grid(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert grid.name(0) == "PP(0) DP(0) CP(0) TP(0)"
    assert grid.name(31) == "PP(1) DP(3) CP(1) TP(1)"
    assert grid.name(16 + 8 + 2) == "PP(1) DP(2) CP(1) TP(0)"
    assert Grid(dp_shard=4, ep=2, tp=2).name(3) == "PP(0) DP(1) CP(0) TP(1) EP(1)"


def test_the_map_gives_size_stride_and_first_group() -> None:
    lines = Grid(pp=2, dp_shard=6, tp=2).describe()
    assert [line.split() for line in lines] == [
        ["pp", "2", "stride", "12", "ranks", "0,", "12"],
        ["dp_replicate", "1", "stride", "1", "ranks", "0"],
        ["dp_shard", "6", "stride", "2", "ranks", "0,", "2,", "4,", "6,", "..."],
        ["cp", "1", "stride", "1", "ranks", "0"],
        ["tp", "2", "stride", "1", "ranks", "0,", "1"],
    ]


def test_experts_that_do_not_divide_a_stage_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ep\*etp = 6 must divide 4"):
        Grid(dp_shard=4, ep=6)
    with pytest.raises(KeyError):
        Grid().size("dp")
