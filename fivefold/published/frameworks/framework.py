"""What a framework does in a range of its releases."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fivefold.config.config import Config
from fivefold.predict.software import Software
from fivefold.published.replay.step import Replay

Overlap = Literal["replicas", "shards", "gather"]
HIDDEN_TP = 0.6
"""Share of a collective that others hide by cutting it and its multiplication into pieces: the
first piece overlaps with nothing, and small pieces run slower."""
OTHERS = Software(
    hidden_tp=HIDDEN_TP,
    eager_dx=False,
    reduces_once=True,
    gathers_by_block=True,
    accumulates_apart="never",
    loops_experts=True,
    state_kernels=True,
)
"""What frameworks other than Fivefold have in common."""


@dataclass(frozen=True, eq=False)
class Framework:
    """A framework, from one of its releases to the next that it has an entry for.

    Attributes:
        name: name, as the column `framework` gives it.
        mark: regular expression for the framework's own names and those of models whose recipes
            say that it trained them, in lower case.
        since: year and month of the first release for which this holds.
        software: kernels and habits; some are taken only where the row's settings have them.
        overlaps_tp: whether tensor-parallel collectives overlap with multiplications in pieces,
            even if the row does not say so.
        sequence_parallel: whether sequence parallelism comes with tensor parallelism.
        shards: ZeRO stage where none is given.
        overlaps: data-parallel messages beside computation: of gradients that are not sharded
            ("replicas") and of those that are once a step, by ZeRO-1 ("shards"), beside the
            backward; of parameters ("gather"), beside the next forward.
        fused_loss: whether the loss is one kernel over the logits.
        compiles_loss: whether the loss is compiled where the model is, and so is one kernel.
        separate_loss: whether logits in fp32, their log-softmax and its gradient are tensors each.
        recomputes: modules that the backward runs again where nothing else is recomputed.
        fp8_recipe: recipe if the row does not name one.
        settings: further settings of every run, by field name.
        expert_settings: settings of models with experts, by field name.
        microbatch_a_rank: whether a step has one microbatch per pipeline rank by default.
        divide: function from configuration and number of stages to a layout string; None: even
            stages if layers divide.
        whole_attention: whether its FLOP/s count causal attention in full instead of half.
        gigabyte: bytes of the unit that it calls GB.
        held: bytes a parameter of weights, gradients, masters and moments, where its memory is not
            replayed; None: as Megatron-LM or Fivefold hold them.
        replay: class that replays its steps, if it publishes what the allocator has reserved.
    """

    name: str
    mark: str
    since: tuple[int, ...] = ()
    software: Software = OTHERS
    overlaps_tp: bool = False
    sequence_parallel: bool = True
    shards: int = 1
    overlaps: tuple[Overlap, ...] = ("replicas", "shards", "gather")
    fused_loss: bool = False
    compiles_loss: bool = False
    separate_loss: bool = False
    recomputes: tuple[str, ...] = ()
    fp8_recipe: str = "tensorwise"
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    expert_settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    microbatch_a_rank: bool = False
    divide: Callable[[Config, int], str] | None = None
    whole_attention: bool = False
    gigabyte: float = 1e9
    held: tuple[float, float, float, float] | None = None
    replay: type[Replay] | None = None
