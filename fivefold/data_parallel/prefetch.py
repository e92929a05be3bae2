"""When FSDP2 gathers each block's parameters: one block ahead, or when needed."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch.distributed.fsdp import FSDPModule

from fivefold.model.moe.layer import Experts
from fivefold.model.prediction import MTPModule


def set_prefetch(units: Sequence[FSDPModule], early: bool) -> None:
    """Gather each block's parameters while the previous block computes, or not before use.

    By default FSDP2 prefetches in the backward in the reverse order of all forwards. A pipeline
    interleaves microbatches, so the last of these gathers would be wasted. Prefetching the
    root, which stays gathered in a backward, gathers nothing. Multi-token prediction layers,
    which an evaluation skips, are gathered when they run.
    """
    root, *layers = units
    backward = [root, *last_layer_first(layers)]
    for unit, following in zip(backward, [*backward[1:], root], strict=True):
        unit.set_modules_to_backward_prefetch([following if early else root])
    predictions = [unit for unit in layers if isinstance(unit, MTPModule)]
    parts: list[list[Any]] = [[m for m in each.modules() if m in layers] for each in predictions]
    always = [unit for unit in layers if unit not in {m for part in parts for m in part}]
    for run in (always, *parts) if early else ():
        for unit, others in _with_following(run):
            unit.set_modules_to_forward_prefetch(others)


def _with_following(units: Sequence[FSDPModule]) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    """Each layer with its own experts and the next layer, to prefetch.

    Experts prefetch nothing: a backward that recomputes them would gather a finished layer.
    """
    places = [place for place, unit in enumerate(units) if not isinstance(unit, Experts)]
    for place, after in pairwise([*places, len(units)]):
        yield units[place], list(units[place + 1 : after + 1])


def last_layer_first(units: Sequence[FSDPModule]) -> Iterator[FSDPModule]:
    """The order of a backward: from the last layer to the first, each before its experts."""
    experts: list[FSDPModule] = []
    for unit in reversed(units):
        if isinstance(unit, Experts):
            experts.append(unit)
        else:
            yield unit
            yield from experts
            experts = []
