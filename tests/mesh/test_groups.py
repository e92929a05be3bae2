"""Groups for the messages between neighbours of a pipeline, without any process."""

from typing import Any
from unittest.mock import patch

import pytest

from fivefold.mesh import groups
from fivefold.mesh.groups import neighbours_by_round


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
