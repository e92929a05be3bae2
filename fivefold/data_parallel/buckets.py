"""Divides gradients into buckets, which are summed over ranks in one message each; torch-free."""

from collections.abc import Iterable, Iterator


def buckets_of(sizes: Iterable[int], limit: int) -> Iterator[slice]:
    """The slices of a list of gradients that form a bucket each.

    A bucket ends with the gradient that makes it full, as in Megatron-LM.

    Args:
        sizes: elements of each gradient, in the order in which they are computed.
        limit: elements with which a bucket is full.
    """
    first = end = held = 0
    for size in sizes:
        end += 1
        held += size
        if held >= limit:
            yield slice(first, end)
            first, held = end, 0
    if first < end:
        yield slice(first, end)
