"""The order of samples as pure functions of their index, without state to save or share."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 8
# Weights whose common denominator is larger are rounded to this one: an error below 1e-6.
_LONGEST_PERIOD = 1 << 20


def shuffled(index: int, size: int, key: Sequence[int]) -> int:
    """The image of `index` under the permutation of range(size) that `key` selects.

    It is a balanced Feistel network over the next power of four, applied until the result is inside
    the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So a shuffled
    order of 10^9 samples needs no memory and no start-up time. It depends only on SeedSequence,
    whose values numpy guarantees, and not on numpy's generators.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64).tolist()
    while True:
        left, right = index >> half, index & mask
        for round_key in round_keys:
            left, right = right, left ^ (mixed(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


def mixed(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class Blend:
    """Interleaves corpora by weight: gives the corpus of the i-th sample, and its number there.

    The order repeats with a period of the weights' common denominator. In a period each corpus has
    its exact number of samples (by largest remainder, if the denominator had to be rounded), evenly
    spaced. After any n samples, corpus c of C with weight w has given w * n samples, to within
    (1 + w * C) / 2.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """Prepare the order; weights are positive and need not sum to one."""
        shares = [weight / sum(weights) for weight in weights]
        period = lcm(*(share.denominator for share in shares))
        if period > _LONGEST_PERIOD:
            period = _LONGEST_PERIOD
        self._counts = _apportion(shares, period)
        corpora = np.repeat(np.arange(len(weights)), self._counts)
        ranks = np.concatenate([np.arange(count) for count in self._counts])
        spacing = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
        order = np.argsort(spacing, kind="stable")
        self._corpora, self._ranks = corpora[order], ranks[order]

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The corpus of sample `index` >= 0, and the number of its samples before this one."""
        periods, rest = divmod(index, len(self._corpora))
        corpus = int(self._corpora[rest])
        return corpus, periods * self._counts[corpus] + int(self._ranks[rest])


def _apportion(shares: Sequence[Fraction], total: int) -> list[int]:
    """Integers in proportion to the shares that sum to `total`, by largest remainder.

    None of them is zero; if that requires it, they sum to a little more than `total`.
    """
    exact = [share * total for share in shares]
    counts = [max(1, int(quota)) for quota in exact]
    by_shortfall = sorted(range(len(shares)), key=lambda c: counts[c] - exact[c])
    missing = total - sum(counts)
    for corpus in by_shortfall[: max(0, missing)]:
        counts[corpus] += 1
    return counts
