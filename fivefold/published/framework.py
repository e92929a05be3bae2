"""Properties of a framework that no column of a published run gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fivefold.config.config import Config
from fivefold.published.replay.step import Replay


@dataclass(frozen=True)
class Framework:
    """Properties of a framework; the defaults are those of Megatron-LM.

    Attributes:
        mark: regular expression for the names of its sources, in lower case.
        attention: attention kernel, as in `Software`.
        fused: whether elementwise operations are fused, as in `Software`.
        joins_linears: whether linear layers are joined, as in `Software`.
        fused_loss: whether the loss is one kernel over the logits.
        accumulates_apart: whether kernels of their own add gradients, as in `Software`.
        overlaps_backward_tp: whether tensor-parallel communication overlaps with the backward, as
            in `Software`.
        by_tensor: whether each parameter is handled separately, as in `Software`.
        overlaps_tp: whether tensor-parallel collectives overlap with multiplications in pieces,
            even if the row does not say so.
        overlaps_shards: whether gradients that are sharded once a step (ZeRO-1) are reduced in
            parallel to the backward.
        overlaps_gather: whether parameters are gathered in parallel to the next forward.
        fp8_recipe: recipe if the row does not name one.
        whole_graph: whether steps of models with experts in MXFP8 are one CUDA graph, which needs
            buffers of a fixed size; their all-to-alls then overlap in pairs, where there are any.
        expert_settings: settings of models with experts, by field name.
        microbatch_a_rank: whether a step has one microbatch per pipeline rank by default.
        divide: function from configuration and number of stages to a layout string; None: even
            stages if layers divide.
        whole_attention: whether its FLOP/s count causal attention in full instead of half.
        gigabyte: bytes of the unit that it calls GB.
        replay: class that replays its steps, if it publishes what the allocator has reserved.
    """

    mark: str
    attention: Literal["best", "flash2", "flash1"] = "best"
    fused: bool = True
    joins_linears: bool = True
    fused_loss: bool = False
    accumulates_apart: bool = False
    overlaps_backward_tp: bool = True
    by_tensor: bool = False
    overlaps_tp: bool = False
    overlaps_shards: bool = True
    overlaps_gather: bool = True
    fp8_recipe: str = "tensorwise"
    whole_graph: bool = False
    expert_settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    microbatch_a_rank: bool = False
    divide: Callable[[Config, int], str] | None = None
    whole_attention: bool = False
    gigabyte: float = 1e9
    replay: type[Replay] | None = None
