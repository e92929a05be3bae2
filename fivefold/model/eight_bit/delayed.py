"""Scales of 8-bit operands by the largest elements of earlier steps (delayed scaling).

A step multiplies with scales that are known before it begins, and writes down the largest element
of every operand. After the update these are entered in a history, and the scales of the next step
follow from it (Micikevicius et al. 2022, section 4; Transformer Engine's DelayedScaling). Scales
change between steps alone, and what is written down is a maximum: microbatches share scales, and
recomputation, which repeats an operand, changes neither.

Shapes: S operands of this rank, A operands of the whole model, L steps of the history, E experts
of this rank, 1 of other linear layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.training import TrainingConfig
from fivefold.mesh.collectives import start_all_reduce
from fivefold.mesh.slices import Piece
from fivefold.model.eight_bit.fp8 import (
    E4M3,
    OF_GRADIENTS,
    TINY,
    Scaled,
    narrowed_and_largest,
    over,
)
from fivefold.model.eight_bit.rules import OPERANDS, SCALES, ScaledLayer

INPUT, WEIGHT, GRADIENT = range(OPERANDS)


@dataclass(frozen=True)
class OperandScales:
    """The scales of a linear layer's operands: its input, its weight, its result's gradient.

    Attributes:
        scale: fp32 [3, E], what elements are multiplied with; [3] of a single group.
        seen: fp32, of the same shape: the largest elements of this step so far.
        of_input: scales of the first linear layer of the same input, which others share; None:
            this is the first.
    """

    scale: Tensor
    seen: Tensor
    of_input: "OperandScales | None" = None

    def of_group(self, group: int) -> "OperandScales":
        """Those of one group."""
        first = None if self.of_input is None else self.of_input.of_group(group)
        return OperandScales(self.scale[:, group], self.seen[:, group], first)

    def quantised(self, x_MK: Tensor, operand: int, dtype: torch.dtype) -> Scaled:
        """A matrix in 8 bits; one with an element that is not finite becomes NaN.

        What is larger than the scale expects becomes the largest number of the type.
        """
        if operand == INPUT and self.of_input is not None:
            return self.of_input.quantised(x_MK, operand, dtype)
        seen, scale = self.seen[operand], self.scale[operand].view(1, 1)
        bits, found = narrowed_and_largest(x_MK, scale, dtype)
        torch.maximum(seen, found.view(()), out=seen)
        return Scaled(bits, over(1.0, scale) + found * 0, (None, None))


class DelayedScaling:
    """The histories and scales of all operands that a rank multiplies in 8 bits.

    They are the same on all ranks that hold a layer, and those of one device: ranks compare the
    largest elements of a step, of whatever part of a tensor each of them has multiplied.

    Args:
        layers: 8-bit linear layers of this rank.
        every: 8-bit linear layers of the whole model by name, with the number of their experts
            (None: not grouped). Empty: there are no delayed scales, and nothing is sent.
        training: settings.
        device: where they lie.
    """

    def __init__(
        self,
        layers: Sequence[ScaledLayer],
        every: Mapping[str, int | None],
        training: TrainingConfig,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._most_recent = training.fp8_amax_compute_algo == "most_recent"
        sizes = [OPERANDS * layer.held for layer in layers]
        number, length = sum(sizes), training.fp8_amax_history_len
        self._ends = list(accumulate(sizes))
        self._seen = torch.zeros(number, device=device)
        self._scale = torch.ones(number, device=device)
        self._history = torch.zeros(number, length, device=device)
        self._total = OPERANDS * sum(experts or 1 for experts in every.values())
        self._places = _places(layers, every).to(device)
        types = E4M3, E4M3, OF_GRADIENTS[training.fp8_format or "e4m3"]
        limits = torch.tensor([torch.finfo(each).max for each in types])
        limits *= 2.0**-training.fp8_margin
        each = [limits.repeat_interleave(layer.held) for layer in layers]
        self._limit = torch.cat(each).to(device) if each else self._seen

    def reset(self) -> None:
        """Return to the state before the first step: empty histories, and 1 for every scale."""
        self._scale.fill_(1.0)
        self._history.zero_()

    def of_layers(self) -> Iterator[tuple[ScaledLayer, OperandScales]]:
        """The scales of each layer."""
        parts = map(self._by_layer, (self._scale, self._seen))
        for layer, scale, seen in zip(self._layers, *parts, strict=True):
            shape = OPERANDS, layer.held
            yield layer, OperandScales(scale.view(shape), seen.view(shape))

    def begin(self) -> None:
        """Begin a step; discard what evaluations and skipped steps have recorded."""
        if self._total:
            self._seen.zero_()

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Take the maximum over ranks of the largest finite elements of a step, in one message.

        An element that is not finite is the largest of all, so that every rank leaves it out.
        """
        if not self._total:
            return
        seen = self._seen.nan_to_num(nan=inf, posinf=inf)
        message = seen.new_zeros(self._total).scatter_reduce_(0, self._places, seen, "amax")
        whole = start_all_reduce(message, group, dist.ReduceOp.MAX).wait()
        found = whole[self._places]
        self._seen.copy_(torch.where(found.isfinite(), found, 0.0))

    def update(self) -> None:
        """Add the largest elements of a completed step to the histories, and set the next scales.

        A scale whose history has only zeros stays as it is.
        """
        if not self._total:
            return
        before = self._history[:, :-1]
        self._history.copy_(torch.cat([self._seen[:, None], before], 1))
        known = self._history[:, 0] if self._most_recent else self._history.amax(1)
        scale = self._limit / known.clamp(min=TINY)
        self._scale.copy_(torch.where(known > 0, scale, self._scale))

    def stored(self, *, copies: bool) -> dict[str, Piece]:
        """Histories [3, L] and scales [3] by name, [3, E, L] and [3, E] of experts.

        Args:
            copies: whether to name those that another rank stores, too.
        """
        found = {}
        parts = map(self._by_layer, (self._scale, self._history))
        for layer, scale, history in zip(self._layers, *parts, strict=True):
            if copies or layer.written:
                found[f"{SCALES}{layer.name}.scale"] = _piece(layer, scale)
                found[f"{SCALES}{layer.name}.amax_history"] = _piece(layer, history)
        return found

    def _by_layer(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.tensor_split(self._ends)[: len(self._layers)]

    def held(self) -> tuple[Tensor, ...]:
        """Everything that it keeps from step to step."""
        return self._scale, self._seen, self._history, self._places, self._limit


def _places(layers: Sequence[ScaledLayer], every: Mapping[str, int | None]) -> Tensor:
    """int64 [S]: indices of this rank's operands in a list of [A]."""
    starts, start = {}, 0
    for name, experts in every.items():
        starts[name] = start
        start += OPERANDS * (experts or 1)
    each = [
        starts[layer.name]
        + torch.arange(OPERANDS)[:, None] * (layer.experts or 1)
        + torch.arange(layer.first, layer.first + layer.held)
        for layer in layers
    ]
    return torch.cat([part.flatten() for part in each]) if each else torch.zeros(0).long()


def _piece(layer: ScaledLayer, part: Tensor) -> Piece:
    """What is stored of a layer: a view of `part`, its operands' [3 x E, ...]."""
    rest = tuple(part.shape[1:])
    whole = tuple(slice(0, size) for size in rest)
    operands = slice(0, OPERANDS)
    if layer.experts is None:
        return Piece(part, torch.Size((OPERANDS, *rest)), (operands, *whole))
    own = slice(layer.first, layer.first + layer.held)
    local = part.view(OPERANDS, layer.held, *rest)
    return Piece(local, torch.Size((OPERANDS, layer.experts, *rest)), (operands, own, *whole))
