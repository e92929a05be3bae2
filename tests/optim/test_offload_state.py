"""Optimizer state off the device is cut into buckets in which nothing is lost or counted twice."""

from itertools import pairwise
from math import lcm, prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.memory import update_rooms
from fivefold.model.seeds import derive_seed
from fivefold.optim.offload_state import in_buckets
from fivefold.optim.rounding import LANES, NamedElements

SHAPES = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=3).map(tuple), max_size=8)


@given(shapes=SHAPES, limit=st.integers(1, 9000))
def test_buckets_follow_each_other_and_cut_between_rows_and_vectors(
    shapes: list[tuple[int, ...]], limit: int
) -> None:
    named = {str(place): shape for place, shape in enumerate(shapes)}
    buckets = in_buckets(named, limit)
    covered: dict[str, int] = dict.fromkeys(named, 0)
    at = 0
    for number, bucket in enumerate(buckets):
        assert (bucket.number, bucket.section.start) == (number, at)
        within = 0
        for part in bucket.parts:
            shape, elements = named[part.name], part.elements
            assert elements.start == covered[part.name] and part.within.start == within
            covered[part.name], within = elements.stop, part.within.stop
            assert prod(part.shape) == elements.stop - elements.start == within - part.within.start
            cut = elements.start or elements.stop < prod(shape)
            if len(shape) > 1:
                assert part.shape[1:] == shape[-1:]
                assert elements.start % lcm(shape[-1], LANES) == 0
            else:
                assert part.shape == shape and not cut
        at = bucket.section.stop
        assert within == at - bucket.section.start
        assert 0 < within <= limit or len(bucket.parts) == 1
    assert covered == {name: prod(shape) for name, shape in named.items()}
    # No bucket could have taken the next part as well.
    for bucket, following in pairwise(buckets):
        shape = named[following.parts[0].name]
        least = lcm(shape[-1], LANES) if len(shape) > 1 else prod(shape)
        rest = prod(shape) - following.parts[0].elements.start
        assert bucket.section.stop - bucket.section.start + min(least, rest) > limit


@given(st.integers(0, 1 << 26))
def test_what_fits_in_one_room_has_one(elements: int) -> None:
    rooms, each = update_rooms(elements)
    assert rooms * each >= min(elements, each) and (rooms == 1) == (each == elements)


def _bits(place: NamedElements) -> torch.Tensor:
    return place.random(2, torch.device("cpu"))(slice(None))


def test_rows_of_a_parameter_get_the_random_bits_that_they_have_in_the_whole() -> None:
    slices = (slice(1, 4), slice(0, 70), slice(2, 12))
    whole = NamedElements(derive_seed(3, "x"), "w", (5, 70, 12), slices)
    expected = _bits(whole)
    parts = in_buckets({"w": (3, 70, 10), "v": (70,)}, 700)
    found = [
        _bits(part.place(whole)) for bucket in parts for part in bucket.parts if part.name == "w"
    ]
    assert len(parts) > 1 and torch.equal(torch.cat(found), expected)
