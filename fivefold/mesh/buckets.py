"""Groups tensors into buckets that are sent or updated together; torch-free."""

from collections.abc import Iterable, Iterator


def buckets_of(sizes: Iterable[int], limit: int) -> Iterator[slice]:
    """The slices of a list of tensors that form a bucket each.

    A bucket ends with the tensor that makes it full, as in Megatron-LM.

    Args:
        sizes: elements or bytes of each tensor, in order.
        limit: elements or bytes with which a bucket is full.
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
