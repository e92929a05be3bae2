"""Compares the tensors of a checkpoint with those of a model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from fivefold.checkpoint.index import SavedTensor
from fivefold.config.settings import flag_of
from fivefold.errors import CheckpointError, Mistake, OtherSettings, did_you_mean
from fivefold.model.eight_bit.rules import SCALES
from fivefold.optim.adamw import OPTIMIZER, state_name
from fivefold.optim.rounding import MOMENTS
from fivefold.units import human_count, several

Shapes = Mapping[str, Sequence[int]]

_LISTED = 8


def mismatches(asked: Shapes, saved: Shapes, skip: tuple[str, ...] = ()) -> list[Mistake]:
    """Tensors that are missing, have another shape or are left over, as one mistake for each kind.

    Args:
        asked: global shapes of the model's tensors, by name.
        saved: global shapes of the checkpoint's tensors, by name.
        skip: prefixes of names in the checkpoint that the model need not have.
    """
    missing = sorted(asked.keys() - saved.keys())
    other = sorted(
        name for name in asked.keys() & saved.keys() if tuple(asked[name]) != tuple(saved[name])
    )
    left = sorted(name for name in saved.keys() - asked.keys() if not name.startswith(skip))
    total = f"the model asks for {_sum(asked)}, the checkpoint has {_sum(saved)}"
    kinds = [
        (
            "the model has {} that the checkpoint has not",
            [f"{n}: {_shape(asked[n])}{did_you_mean(n, left)}" for n in missing],
        ),
        (
            "the checkpoint has {} of another shape",
            [f"{n}: model {_shape(asked[n])}, checkpoint {_shape(saved[n])}" for n in other],
        ),
        (
            "the checkpoint has {} that the model has not",
            [f"{n}: {_shape(saved[n])}" for n in left],
        ),
    ]
    return [
        Mistake(what.format(several(len(lines), "tensor")), (*_short(lines), total))
        for what, lines in kinds
        if lines
    ]


def check_shapes(path: Path, asked: Shapes, saved: Shapes) -> None:
    """Check that a folder's tensors are those of the model.

    Raises:
        CheckpointError: they are others.
    """
    if wrong := mismatches(asked, saved):
        first, *others = wrong
        raise CheckpointError(replace(first, what=f"{path}: {first.what}"), *others)


def check_types(asked: Mapping[str, torch.dtype], saved: Mapping[str, SavedTensor]) -> None:
    """Check that the checkpoint's optimizer state fits the types that these settings keep.

    Raises:
        OtherSettings: state of 16 bits here was saved in more, of which each load would round
            some off, or only one of both is in 8 bits, which mean something with scales alone.
    """
    narrow = {
        name.split(".")[1]: (saved[name].dtype, dtype)
        for name, dtype in asked.items()
        if name.startswith(OPTIMIZER) and name in saved and _differ(saved[name].dtype, dtype)
    }
    if narrow:
        raise OtherSettings(
            Mistake(
                "the checkpoint has optimizer state of other types than these settings keep",
                tuple(f"{m}: {was}, here {now}" for m, (was, now) in narrow.items()),
                works=(
                    " ".join(
                        f"{flag_of(m)}-dtype {_FLAGS[was.itemsize]}"
                        for m, (was, _) in narrow.items()
                    ),
                    "--finetune",
                ),
            )
        )


def check_optimizers(asked: Iterable[str], saved: Collection[str]) -> None:
    """Check that a checkpoint has the same optimizer: a matrix has one moment with Muon, two with
    AdamW.

    Raises:
        OtherSettings: it is of the other one.
    """
    first, second = (state_name(moment, "") for moment in MOMENTS)
    here = set(asked)
    for name in sorted(here & set(saved)):
        other = second + name.removeprefix(first)
        if name.startswith(first) and (other in here) != (other in saved):
            was, now = ("adam", "muon") if other in saved else ("muon", "adam")
            what = f"the checkpoint was saved with optimizer = {was}, which is {now} here"
            raise OtherSettings(Mistake(what, works=(f"--optimizer {was}", "--finetune")))


def check_histories(asked: Shapes, saved: Mapping[str, SavedTensor]) -> None:
    """Check that histories of delayed scales have the checkpoint's length.

    Raises:
        OtherSettings: they are longer or shorter here.
    """
    for name, shape in asked.items():
        if name.startswith(SCALES) and name in saved and (was := saved[name].shape) != tuple(shape):
            what = f"the checkpoint has {name} of {_shape(was)}, these settings {_shape(shape)}"
            works = (f"--fp8-amax-history-len {was[-1]}", "--fp8-recipe tensorwise")
            raise OtherSettings(Mistake(what, works=works))


_FLAGS = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp32"}  # fp32 stands for the masters' type


def _differ(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether state in the type `saved` cannot be kept in the type `here`."""
    if 1 in (saved.itemsize, here.itemsize):
        return saved != here
    return here.itemsize < min(saved.itemsize, torch.float32.itemsize)


def _sum(shapes: Shapes) -> str:
    elements = sum(prod(shape) for shape in shapes.values())
    return f"{several(len(shapes), 'tensor')} of {human_count(elements)} elements"


def _shape(shape: Sequence[int]) -> str:
    if not shape:
        return "a scalar"
    return f"{' x '.join(map(str, shape))} = {prod(shape):,} elements"


def _short(lines: list[str]) -> list[str]:
    more = len(lines) - _LISTED
    return lines if more <= 0 else [*lines[:_LISTED], f"and {more:,} more"]
