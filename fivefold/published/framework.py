"""What a framework does that no column of a published run says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fivefold.config.config import Config
from fivefold.published.replay.step import Replay


@dataclass(frozen=True)
class Framework:
    """Habits of a framework; unless said otherwise, those of Megatron-LM.

    Attributes:
        mark: what is found in the sources of its rows, in lower case: a regular expression.
        attention: the kernel, as `Software` has it.
        fused: as `Software` has it, and so are joins_linears, overlaps_backward_tp and by_tensor.
        overlaps_tp: whether tensor-parallel collectives run in pieces beside multiplications, also
            where the row does not say so.
        overlaps_shards: whether gradients that are sharded once a step (ZeRO-1) are reduced beside
            the backward.
        overlaps_gather: whether parameters are gathered beside the next forward.
        fp8_recipe: where the row does not name one.
        expert_settings: settings of models with experts.
        microbatch_a_rank: whether, unless told, a step has a microbatch for each pipeline rank.
        divide: configuration and number of stages -> their layout; None: even ones where layers
            divide.
        whole_attention: whether its FLOP/s count causal attention in full, not by half.
        gigabyte: bytes of what it calls GB.
        replay: its steps, if what its allocator reserves is published.
    """

    mark: str
    attention: Literal["best", "flash2", "flash1"] = "best"
    fused: bool = True
    joins_linears: bool = True
    overlaps_backward_tp: bool = True
    by_tensor: bool = False
    overlaps_tp: bool = False
    overlaps_shards: bool = True
    overlaps_gather: bool = True
    fp8_recipe: str = "tensorwise"
    expert_settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    microbatch_a_rank: bool = False
    divide: Callable[[Config, int], str] | None = None
    whole_attention: bool = False
    gigabyte: float = 1e9
    replay: type[Replay] | None = None
