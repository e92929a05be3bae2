"""AdamW whose weights and moments are stored in fewer bits than it computes with.

They are rounded stochastically. Rounded to the nearest, a moment of few bits stops to decay, and a
weight to move: bf16 keeps 8 bits of a number, and a factor beta2 of 0.999 changes it by less than
half of the last one. Rounded up with the probability of what is cut off, it is right on average
(Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015). Whether a number is
rounded up is a function of the seed, the step and the element's place in the whole parameter, so
that no layout changes it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fivefold.mesh.device import runs_triton
from fivefold.mesh.slices import is_same_memory
from fivefold.model.random_bits import random_bits
from fivefold.model.seeds import derive_seed
from fivefold.optim.eight_bit import FORMATS, EightBits

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
REMAINDER = "remainder"
MASTER = "master"
AT_A_TIME = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that are updated at a time, so that their random bits stay in a CPU's cache."""
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
        """The part [..., C] as a matrix [R, C] in the same memory."""
        return local.view(-1, local.shape[-1])

    def pieces(self, local: Tensor, at_a_time: int) -> Iterator[slice]:
        """Slices of the rows of at most `at_a_time` elements; a row is never cut."""
        rows = self.rows(local)
        each = max(at_a_time // max(rows.shape[1], 1), 1)
        return (slice(start, start + each) for start in range(0, len(rows), each))

    def ids(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64 numbers of the rows and of the columns in the whole parameter."""
        *outer, inner = self.slices
        ids_R = torch.zeros(1, dtype=torch.int64, device=device)
        for part, size in zip(outer, self.shape[:-1], strict=True):
            along = torch.arange(part.start, part.stop, device=device)
            ids_R = (ids_R[:, None] * size + along).flatten()
        return ids_R[self.within], torch.arange(inner.start, inner.stop, device=device)

    def key(self, step: int) -> int:
        """Key of this parameter's random bits in a step.

        Args:
            step: optimizer steps taken before.
        """
        return derive_seed(self.seed, "moments", step, self.name)

    def random(self, step: int, device: torch.device) -> Callable[[slice], Tensor]:
        """64 random bits of each element, int64, as a function of a slice of the rows."""
        ids_R, columns_C = self.ids(device)
        key = self.key(step)
        return lambda rows: random_bits(ids_R[rows, None], columns_C, key)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """`x` in bf16: one of the two numbers around it, so that it is right on average.

    Numbers of bf16 stay as they are; so do infinities and NaN.

    Args:
        x: floating point; fp64 is first rounded to fp32.
        bits: int64 of the same shape, of which the last 16 bits are random.
    """
    wide = x.float()
    # The bits of a float grow with its magnitude, so a carry out of the bits cut off rounds up.
    nudged = wide.view(torch.int32) + (bits & 0xFFFF).int()
    found = (nudged & -0x10000).view(torch.float32)
    return torch.where(wide.isfinite(), found, wide).bfloat16()


class RoundingAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, fused, with moments that are rounded after each update.

    Each piece of a parameter is updated in wide copies of its gradient and moments: so the update
    itself sees every bit of this step's moments, and nothing whole is ever wide. On a GPU one
    kernel does it all (`adamw_kernels`).

    Args:
        groups: groups of parameters, as for torch's.
        places: the place of each parameter in the model.
        steps: tells the optimizer steps taken before.
        settings: settings of torch's AdamW.
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
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        found_inf = getattr(self, "found_inf", None)
        assert leaf.grad is not None
        master = Master.of(leaf.data, state, place)
        grads = place.rows(leaf.grad)
        moments = [Moment.of(name, state, place) for name in MOMENTS]
        if runs_triton(leaf):
            from fivefold.optim import adamw_kernels

            state["step"] += 1.0 if found_inf is None else 1.0 - found_inf
            ids, key = place.ids(leaf.device), place.key(self._taken())
            adamw_kernels.update(master, grads, moments, ids, key, state["step"], found_inf, group)
            return
        kinds = {master.matrix.dtype, *(moment.matrix.dtype for moment in moments)}
        rounds = kinds != {dtype}
        random = place.random(self._taken(), leaf.device)
        beta1, beta2 = group["betas"]
        step = state["step"].clone()
        for rows in place.pieces(leaf, AT_A_TIME[leaf.device.type]):
            kept = [master.wide(rows, dtype), grads[rows]]
            kept += [moment.wide(rows, dtype) for moment in moments]
            weight, grad, first, second = (_computed(each, dtype) for each in kept)
            step.copy_(state["step"])
            adamw(
                [weight],
                [grad],
                [first],
                [second],
                [],
                [step],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
            bits = random(rows) if rounds else None
            master.keep(rows, _like(weight, kept[0]), bits)
            for number, (moment, new) in enumerate(zip(moments, (first, second), strict=True)):
                own = None if bits is None else bits >> 16 * number
                moment.keep(rows, _like(new, kept[2 + number]), own, found_inf)
        state["step"].copy_(step)


@dataclass(frozen=True)
class Master:
    """A weight that is updated, as rows of its last dim.

    Attributes:
        matrix: [R, C] the weight.
        remainder: [R, C] int16, what a weight of bf16 lacks of one in fp32; None: nothing.
    """

    matrix: Tensor
    remainder: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, state: Mapping[str, Tensor], place: NamedElements) -> "Master":
        """A weight, and its remainder if torch's optimizer state has one."""
        remainder = state.get(REMAINDER)
        rows = None if remainder is None else place.rows(remainder)
        return cls(place.rows(weight), rows)

    def wide(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows in `dtype`; the memory of the weight where it is kept so."""
        if self.remainder is None:
            return self.matrix[rows].to(dtype)
        return exact(self.matrix[rows], self.remainder[rows])

    def keep(self, rows: slice, new_RC: Tensor, bits: Tensor | None) -> None:
        """Replace some rows; uses the third 16 random bits, as `Moment.keep` uses others."""
        kept = self.matrix[rows]
        if self.remainder is not None:
            divide(new_RC, kept, self.remainder[rows])
        elif kept.dtype != new_RC.dtype:
            assert bits is not None
            kept.copy_(rounded(new_RC, bits >> 32))
        elif not is_same_memory(kept, new_RC):
            kept.copy_(new_RC)


def exact(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder (of equal shape), to the bit."""
    high = weight.view(torch.int16).int() << 16
    return (high + remainder).view(torch.float32)


def divide(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Split an fp32 master into the nearest bf16 weight and the int16 remainder, in place.

    As in Transformer Engine, a master in the middle between two goes away from 0, not to the even
    one: with 16 bits more, no other rule leaves a way back.
    """
    whole = master.view(torch.int32)
    remainder.copy_((whole << 16) >> 16)
    weight.view(torch.int16).copy_((whole - remainder) >> 16)


@dataclass(frozen=True)
class Moment:
    """A moment of a part of a parameter, as rows of its last dim.

    Attributes:
        matrix: [R, C] the moment.
        scales: [R, C / BLOCK] scales of its blocks; None: it has none.
        form: its format, if it has scales.
    """

    matrix: Tensor
    scales: Tensor | None
    form: EightBits

    @classmethod
    def of(cls, name: str, state: Mapping[str, Tensor], place: NamedElements) -> "Moment":
        """The moment called `name` in torch's optimizer state, and its scales if there are any."""
        scales = state.get(scale_of(name))
        rows = None if scales is None else place.rows(scales)
        return cls(place.rows(state[name]), rows, FORMATS[name])

    def wide(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows in `dtype`; the memory of the moment where it is kept so."""
        if self.scales is None:
            return self.matrix[rows].to(dtype)
        return self.form.unpack(self.matrix[rows], self.scales[rows]).to(dtype)

    def keep(
        self, rows: slice, new_RC: Tensor, bits: Tensor | None, found_inf: Tensor | None = None
    ) -> None:
        """Replace some rows.

        Args:
            rows: which.
            new_RC: their new values in a wide type, perhaps in the memory of the moment.
            bits: int64 of the same shape, of which the last 16 bits are random; needed where the
                moment has fewer bits than the new values.
            found_inf: where it is 1, the new values are those of before, and no bit changes.
        """
        kept = self.matrix[rows]
        if self.scales is None:
            if kept.dtype == new_RC.dtype:
                if not is_same_memory(kept, new_RC):
                    kept.copy_(new_RC)
                return
            assert bits is not None
            kept.copy_(rounded(new_RC, bits))
            return
        assert bits is not None
        for old, new in zip((kept, self.scales[rows]), self.form.pack(new_RC, bits), strict=True):
            before, after = old.view(torch.uint8), new.view(torch.uint8)
            before.copy_(after if found_inf is None else torch.where(found_inf > 0, before, after))


def _like(flat: Tensor, kept: Tensor) -> Tensor:
    """The result for a piece, without the padding that `_computed` added."""
    return flat.view(-1)[: kept.numel()].view_as(kept)


def _computed(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """A piece in the form in which the update computes: itself if possible, else a flat padded
    copy.

    A CPU's fused kernel computes what is left over of its vectors in other bits, so that these
    would depend on how a parameter is cut; the copy has no such rest.
    """
    if kept.is_cuda or kept.numel() % LANES == 0:
        return kept.to(dtype)
    wide = kept.new_zeros(-(-kept.numel() // LANES) * LANES, dtype=dtype)
    wide[: kept.numel()].view_as(kept).copy_(kept)
    return wide


def scale_of(moment: str) -> str:
    """The name in the optimizer's state of a moment's scales."""
    return f"{moment}_scale"
