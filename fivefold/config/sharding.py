"""Sharding strategies: what data-parallel ranks split, and when they gather and reduce it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class Sharding:
    """One strategy (ZeRO; Rajbhandari et al., 2020), apart from types, which frameworks choose.

    Attributes:
        name: Megatron-LM's word for it.
        zero_stage: 0 where nothing is split.
        splits_optimizer: masters and moments exist once in a sharding group.
        splits_gradients: gradients are reduced to their shard in every microbatch.
        splits_parameters: parameters are gathered for each use, and freed after it.
    """

    name: ShardingStrategy
    zero_stage: int
    splits_optimizer: bool
    splits_gradients: bool
    splits_parameters: bool

    @property
    def paper_name(self) -> str:
        """What papers call it; '-' without sharding."""
        return f"ZeRO-{self.zero_stage}" if self.zero_stage else "-"

    def gathers(self, passes: int) -> int:
        """How often a step gathers each parameter, with so many forwards of a stage.

        Where the program says when parameters are gathered, the program counts instead.
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
