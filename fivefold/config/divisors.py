"""The divisors of a number; sizes often have to be one of them."""

from collections.abc import Iterable
from math import isqrt


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest(wanted: int, choices: Iterable[int]) -> list[int]:
    """The two choices closest to `wanted`, ascending."""
    return sorted(sorted(set(choices), key=lambda c: (abs(c - wanted), c))[:2])
