"""AdamW whose moments are kept in fewer bits than they are computed with, rounded stochastically.

Rounded to the nearest, a moment of few bits stops to decay: bf16 keeps 8 bits of a number, and a
factor beta2 of 0.999 changes it by less than half of the last one. Rounded up with the probability
of what is cut off, it is right on average (Gupta et al., Deep Learning with Limited Numerical
Precision, ICML 2015). Whether a number is rounded up is a function of the seed, the step and the
element's place in the whole parameter, so that no layout changes it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fivefold.model.dropout import random_bits
from fivefold.model.seeds import derive_seed

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
AT_A_TIME = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that are updated at a time: their random bits stay in the cache of a CPU."""
LANES = 64
"""A multiple of the numbers in the vectors of any CPU."""


@dataclass(frozen=True)
class NamedElements:
    """A rank's part of a parameter, as rows [R, C] of its last dim.

    Attributes:
        seed: seed of the run.
        name: name by which checkpoints know the parameter; copies of a weight share it.
        shape: shape of the whole parameter.
        slices: the part's slice of each dim.
        within: the rows that are meant, counted over all dims but the last.
    """

    seed: int
    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    within: slice = field(default_factory=lambda: slice(None))

    def rows(self, local: Tensor) -> Tensor:
        """The part as a matrix in the same memory."""
        return local.view(-1, local.shape[-1])

    def bits(self, step: int, device: torch.device, at_a_time: int) -> Iterator[tuple[slice, Any]]:
        """Slices of the rows of at most `at_a_time` elements, each with 64 random bits an element.

        Args:
            step: optimizer steps taken before.
            device: where the bits are made.
            at_a_time: elements; a row is never cut.
        """
        *outer, inner = self.slices
        ids_R = torch.zeros(1, dtype=torch.int64, device=device)
        for part, size in zip(outer, self.shape[:-1], strict=True):
            along = torch.arange(part.start, part.stop, device=device)
            ids_R = (ids_R[:, None] * size + along).flatten()
        ids_R = ids_R[self.within]
        columns_C = torch.arange(inner.start, inner.stop, device=device)
        key = derive_seed(self.seed, "moments", step, self.name)
        each = max(at_a_time // max(len(columns_C), 1), 1)
        for start in range(0, len(ids_R), each):
            rows = slice(start, start + each)
            yield rows, random_bits(ids_R[rows, None], columns_C, key)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """`x` in bf16: one of the two numbers around it, so that it is right on average.

    Numbers of bf16 stay as they are; so do infinities and NaN.

    Args:
        x: floating point; fp64 is first rounded to fp32.
        bits: int64 of the same shape, of which the last 16 bits are random.
    """
    wide = x.float()
    # The bits of a float grow with its magnitude: what is added to those that are cut off carries.
    nudged = wide.view(torch.int32) + (bits & 0xFFFF).int()
    found = (nudged & -0x10000).view(torch.float32)
    return torch.where(wide.isfinite(), found, wide).bfloat16()


class RoundingAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, fused, with moments that are rounded after each update.

    Each piece of a parameter is updated in wide copies of its moments: so the update itself sees
    every bit of this step's moments, and no whole moment is ever wide.

    Args:
        groups: groups of parameters, as for torch's.
        places: the place of each parameter in the model.
        steps: tells the optimizer steps taken before.
        settings: of torch's AdamW.
    """

    def __init__(
        self,
        groups: list[dict],
        places: Mapping[Tensor, NamedElements],
        steps: Callable[[], int],
        **settings: Any,
    ) -> None:
        super().__init__(groups, **settings)
        self._places, self._taken = places, steps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; where `found_inf` is 1, no bit changes."""
        for group in self.param_groups:
            for leaf in group["params"]:
                self._update(leaf, group)

    def _update(self, leaf: Tensor, group: Mapping[str, Any]) -> None:
        state, place = self.state[leaf], self._places[leaf]
        tensors = [leaf.data, leaf.grad, *(state[moment] for moment in MOMENTS)]
        matrices = [place.rows(tensor) for tensor in tensors]
        beta1, beta2 = group["betas"]
        step = state["step"].clone()
        at_a_time = AT_A_TIME[leaf.device.type]
        for rows, bits in place.bits(self._taken(), leaf.device, at_a_time):
            kept = [matrix[rows] for matrix in matrices]
            weight, grad, first, second = wide = [_computed(each, leaf.dtype) for each in kept]
            step.copy_(state["step"])
            adamw(
                [weight],
                [grad],
                [first],
                [second],
                [],
                [step],
                fused=True,
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
            for here, new, own in zip(kept, wide, (None, None, bits, bits >> 16), strict=True):
                if new is not here:
                    found = new.view(-1)[: here.numel()].view_as(here)
                    narrow = own is not None and here.dtype != leaf.dtype
                    here.copy_(rounded(found, own) if narrow else found)
        state["step"].copy_(step)


def _computed(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """A piece as the update computes with it: itself if it can be, else a flat copy.

    A CPU's fused kernel computes what is left over of its vectors in other bits, so that these
    would depend on how a parameter is cut; the copy has no such rest.
    """
    if kept.is_cuda or kept.numel() % LANES == 0:
        return kept.to(dtype)
    wide = kept.new_zeros(-(-kept.numel() // LANES) * LANES, dtype=dtype)
    wide[: kept.numel()].view_as(kept).copy_(kept)
    return wide
