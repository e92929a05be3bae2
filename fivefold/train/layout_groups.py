"""The process groups that a layout needs."""

from fivefold.counts.parameters import tied_ranks
from fivefold.counts.shards import num_expert_shards
from fivefold.layout import Layout
from fivefold.mesh.groups import Groups, build_groups


def groups_of(layout: Layout, rank: int, device_type: str) -> Groups:
    """The groups of a rank; collective over all ranks of the layout."""
    return build_groups(
        layout.grid,
        rank,
        device_type,
        sharded=layout.config.parallel.sharding.splits_optimizer,
        cp_sizes=layout.config.parallel.hierarchical_context_parallel_sizes,
        tied_ranks=tied_ranks(layout),
        mirrored=layout.num_copies > 1,
        expert_shards=num_expert_shards(layout) if layout.config.model.num_experts else None,
        nodes=layout.node_sizes,
        holders=layout.config.optimizer.optimizer == "muon",
    )
