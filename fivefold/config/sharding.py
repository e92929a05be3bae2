"""Sharding strategies: what data-parallel ranks split, and when they gather and reduce it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class Sharding:
    """A sharding strategy (ZeRO; Rajbhandari et al., 2020), without the choice of types.

    Attributes:
        name: Megatron-LM's name of the strategy.
        zero_stage: stage of ZeRO; 0 if nothing is split.
        splits_optimizer: whether master weights and moments are split over a sharding group.
        splits_gradients: whether gradients are reduced to shards in every microbatch.
        splits_parameters: whether parameters are gathered for each use and freed after it.
    """

    name: ShardingStrategy
    zero_stage: int
    splits_optimizer: bool
    splits_gradients: bool
    splits_parameters: bool

    @property
    def paper_name(self) -> str:
        """The name in papers; '-' without sharding."""
        return f"ZeRO-{self.zero_stage}" if self.zero_stage else "-"

    def gathers(self, passes: int) -> int:
        """How often a step with this number of forwards of a stage gathers each parameter.

        This does not apply with pipeline_max_unsharded_stages, where the program decides.
        """
        return 2 * passes if self.splits_parameters else 1

    def reductions(self, passes: int) -> int:
        """How often a step reduces each gradient over the sharding group."""
        return passes if self.splits_gradients else 1


SHARDING: Mapping[ShardingStrategy, Sharding] = MappingProxyType(
    {
        each.name: each
        for each in (
            Sharding("no_shard", 0, False, False, False),
            Sharding("optim", 1, True, False, False),
            Sharding("optim_grads", 2, True, True, False),
            Sharding("optim_grads_params", 3, True, True, True),
        )
    }
)
