"""Finds tensors with infinities or NaN."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Converted(NamedTuple):
    """The result of a conversion.

    Attributes:
        size: bytes of its weights.
        spoilt: tensors that are not finite, each with the number of such elements.
    """

    size: int
    spoilt: list[str]


def spoilt(tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors that are not finite, each with the number of such elements."""
    found = []
    for name, tensor in tensors.items():
        known = tensor.bfloat16() if tensor.itemsize == 1 else tensor  # not so numbers of 8 bits
        if bad := int((~known.isfinite()).sum()):
            found.append(f"{name} ({bad} of {tensor.numel()} elements)")
    return found
