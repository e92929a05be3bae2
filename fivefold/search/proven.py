"""Settings that published runs have used, among those that a search may choose."""

from types import MappingProxyType
from typing import Any

from fivefold.layout import Layout
from fivefold.predict.prediction import SEEN_SCHEDULES
from fivefold.search.request import Only

PROVEN: Only = MappingProxyType(
    {
        "pipeline_schedule": SEEN_SCHEDULES,
        "data_parallel_sharding_strategy": frozenset({"no_shard", "optim", "optim_grads_params"}),
        "num_distributed_optimizer_instances": frozenset({1}),
        "cp_comm_type": frozenset({("p2p",)}),
        "recompute_method": frozenset({"block", "uniform"}),
        "recompute_in_flight_limit": frozenset({None}),
        "fine_grained_activation_offloading": frozenset({False}),
        "cross_entropy_fusion_impl": frozenset({"native"}),
    }
)
"""The values that some run of `benchmarks/data/` has. A test holds the two to each other.

Where a source does not say how context parallelism communicates, Megatron-LM's default is taken.
"""


def settings_of(layout: Layout) -> dict[str, Any]:
    """The settings of a layout that `PROVEN` lists, with its actual schedule."""
    settings = {name: layout.config.value(name) for name in PROVEN}
    if layout.grid.cp == 1:
        del settings["cp_comm_type"]
    return settings | {"pipeline_schedule": layout.schedule}


def unproven(layout: Layout) -> int:
    """Number of settings that no published run had."""
    return sum(value not in PROVEN[name] for name, value in settings_of(layout).items())
