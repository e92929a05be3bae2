"""Optimizer state off the device is cut into buckets in which nothing is lost or counted twice."""

from itertools import pairwise
from math import lcm, prod
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config import memory
from fivefold.config.memory import update_buffers
from fivefold.config.training import BLOCK
from fivefold.memory.host import HostLink
from fivefold.model.seeds import derive_seed
from fivefold.optim.offload_buckets import GRADIENT, in_buckets
from fivefold.optim.offload_state import OffloadedState
from fivefold.optim.rounding import LANES, MASTER, NamedElements

CPU = torch.device("cpu")
MASTERS = MASTER, torch.float32
ROWS = st.lists(st.integers(0, 12), max_size=2).map(tuple)
SHAPES = st.lists(st.builds(lambda rows, size: (*rows, size), ROWS, st.integers(0, 90)), max_size=8)


def _likes(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A master, a moment that is narrow for matrices only, and its scales."""
    like = {MASTER: torch.empty(shape, device="meta")}
    if len(shape) == 1:
        return like | {"moment": torch.empty(shape, device="meta")}
    blocks = (*shape[:-1], -(-shape[-1] // BLOCK))
    moment, scale = (torch.empty(s, dtype=torch.uint8, device="meta") for s in (shape, blocks))
    return like | {"moment": moment, "scale": scale}


@given(shapes=SHAPES, limit=st.integers(1, 9000))
def test_buckets_follow_each_other_and_cut_between_rows_and_vectors(
    shapes: list[tuple[int, ...]], limit: int
) -> None:
    named = {str(place): shape for place, shape in enumerate(shapes)}
    buckets = in_buckets(named, limit, _likes)
    covered: dict[str, int] = dict.fromkeys(named, 0)
    at = 0
    for number, bucket in enumerate(buckets):
        assert (bucket.number, bucket.sections[MASTERS].start) == (number, at)
        within = 0
        for part in bucket.parts:
            shape, elements = named[part.name], part.elements
            assert (
                elements.start == covered[part.name] and part.places[MASTER].within.start == within
            )
            covered[part.name], within = elements.stop, part.places[MASTER].within.stop
            assert (
                prod(part.shape)
                == elements.stop - elements.start
                == within - part.places[MASTER].within.start
            )
            cut = elements.start or elements.stop < prod(shape)
            if len(shape) > 1:
                assert part.shape[1:] == shape[-1:]
                assert elements.start % lcm(shape[-1], LANES) == 0
            else:
                assert part.shape == shape and not cut
        at = bucket.sections[MASTERS].stop
        assert within == at - bucket.sections[MASTERS].start
        assert 0 < within <= limit or len(bucket.parts) == 1
    assert covered == {name: prod(shape) for name, shape in named.items()}
    # No bucket could have taken the next part as well.
    for bucket, following in pairwise(buckets):
        shape = named[following.parts[0].name]
        least = lcm(shape[-1], LANES) if len(shape) > 1 else prod(shape)
        rest = prod(shape) - following.parts[0].elements.start
        assert (
            bucket.sections[MASTERS].stop - bucket.sections[MASTERS].start + min(least, rest)
            > limit
        )


@given(shapes=SHAPES, limit=st.integers(1, 9000))
def test_every_state_has_its_own_place_and_any_bucket_fits_in_a_buffer(
    shapes: list[tuple[int, ...]], limit: int
) -> None:
    named = {str(place): shape for place, shape in enumerate(shapes)}
    with patch.object(memory, "UPDATE_BUCKET", limit):
        state = OffloadedState(named, _likes_of_all, HostLink(CPU), None, copied=False)
    buffer = state.buffer(lambda numel, dtype: torch.empty(numel, dtype=dtype), gradients=True)
    for bucket in state.buckets:
        lines = state.lines_of(bucket)
        if prod(bucket.parts[0].shape) <= limit:
            assert {line: len(part) for line, part in bucket.in_buffer(buffer).items()} == {
                line: len(part) for line, part in lines.items()
            }
        for part in bucket.parts:
            for number, name in enumerate(sorted(part.places)):
                part.of(name, lines).fill_(number + 1 + 10 * int(part.name))
    for name, shape in named.items():
        kept = state.kept(name) | {GRADIENT: state.gradient(name)}
        for number, each in enumerate(sorted(kept)):
            like = _likes_of_all(shape)[each]
            assert kept[each].shape == like.shape and kept[each].dtype == like.dtype
            assert (kept[each] == number + 1 + 10 * int(name)).all()


def _likes_of_all(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return _likes(shape) | {GRADIENT: torch.empty(shape, dtype=torch.bfloat16, device="meta")}


@given(st.integers(0, 1 << 26))
def test_what_fits_in_one_buffer_has_one(elements: int) -> None:
    number, each = update_buffers(elements)
    assert number * each >= min(elements, each) and (number == 1) == (each == elements)


def _bits(place: NamedElements) -> torch.Tensor:
    return place.random(2, torch.device("cpu"))(slice(None))


def test_rows_of_a_parameter_get_the_random_bits_that_they_have_in_the_whole() -> None:
    slices = (slice(1, 4), slice(0, 70), slice(2, 12))
    whole = NamedElements(derive_seed(3, "x"), "w", (5, 70, 12), slices)
    expected = _bits(whole)
    parts = in_buckets({"w": (3, 70, 10), "v": (70,)}, 700, _likes)
    found = [
        _bits(part.place(whole)) for bucket in parts for part in bucket.parts if part.name == "w"
    ]
    assert len(parts) > 1 and torch.equal(torch.cat(found), expected)
