"""ZeRO++'s nodes: what is not divided stays whole, for experts too."""

import pytest

from fivefold.config.parallel import ParallelConfig
from fivefold.mesh.grid import Grid
from fivefold.mesh.nodes import NodeSizes, experts_within


@pytest.mark.parametrize("tp,ep,etp", [(16, 8, 1), (4, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_without_a_size_nothing_is_divided(tp: int, ep: int, etp: int) -> None:
    grid = Grid(1, 1, 8, 1, tp, ep, etp)
    assert NodeSizes.of_experts(ParallelConfig(), grid) == NodeSizes.of(ParallelConfig())


def test_a_node_holds_as_many_more_shards_of_experts_as_these_lie_nearer() -> None:
    grid = Grid(1, 1, 8, 1, 4, 2, 1)  # 32 ranks: 8 dense shards 4 apart, 16 of experts 2 apart
    assert grid.expert_shards == 16
    assert experts_within(2, grid) == 4
    assert experts_within(8, grid) == 1
