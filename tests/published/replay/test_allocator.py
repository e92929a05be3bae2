"""What the model of PyTorch's caching allocator reserves, worked out by hand from its rules."""

import random

import pytest

from fivefold.published.replay.allocator import Allocator

MIB = 2**20


def allocator(*sizes: float, **settings: object) -> Allocator:
    """With tensors 0, 1, ... of so many MiB."""
    made = Allocator(**settings)  # type: ignore[arg-type]
    for name, size in enumerate(sizes):
        made.allocate(name, size * MIB)
    return made


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ((0.001,), 2),  # small ones share segments of 2 MiB
        ((0.5, 0.5, 0.5, 0.5, 0.5), 4),
        ((1.5,), 20),  # up to 10 MiB they share segments of 20 MiB
        ((9, 9), 20),
        ((9, 9, 9), 40),
        ((10,), 10),  # from there on each has its own, of whole 2 MiB
        ((30.1, 30.1), 64),
    ],
)
def test_segments_have_the_sizes_of_their_kind(sizes: tuple[float, ...], reserved: int) -> None:
    assert allocator(*sizes).reserved == reserved * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    memory = allocator(100, 50, 30)
    for name in range(3):
        memory.release(name)
    memory.allocate("a", 40 * MIB)  # of the 50, 10 are left
    memory.allocate("b", 10 * MIB)
    assert memory.reserved == 180 * MIB
    memory.allocate("c", 30 * MIB)
    memory.allocate("d", 60 * MIB)
    assert memory.reserved == 180 * MIB
    memory.allocate("e", 50 * MIB)  # 40 of the 100 are left
    assert memory.reserved == 230 * MIB


def test_freed_neighbours_are_one_block_but_segments_stay_apart() -> None:
    memory = allocator(100)
    memory.release(0)
    for name in "abcd":
        memory.allocate(name, 25 * MIB)
    for name in "bc":
        memory.release(name)
    memory.allocate("e", 50 * MIB)
    assert memory.reserved == 100 * MIB
    apart = allocator(50, 50)
    apart.release(0)
    apart.release(1)
    apart.allocate("e", 100 * MIB)
    assert apart.reserved == 200 * MIB


def test_streams_do_not_share() -> None:
    memory = allocator(100)
    memory.release(0)
    memory.allocate("a", 100 * MIB, "other")
    assert memory.reserved == 200 * MIB
    assert memory.allocated == memory.most_allocated == 100 * MIB


def test_an_expandable_segment_grows_at_its_end_by_what_is_missing() -> None:
    memory = allocator(40, 40, expandable=True)
    memory.release(1)
    memory.allocate("a", 60 * MIB)
    assert memory.reserved == 100 * MIB
    memory.release(0)
    memory.allocate("b", 60 * MIB)  # the hole of 40 is no use
    assert memory.reserved == 160 * MIB


def test_a_loss_reserves_more_than_it_ever_holds() -> None:
    """Logits, their fp32 copy and log-softmax, then two gradients: 14 bytes an entry, not 12."""
    memory = allocator(200, 400, 400, expandable=True)
    memory.release(1)
    memory.release(0)
    memory.allocate("of the softmax", 400 * MIB)
    memory.allocate("of the copy", 400 * MIB)
    assert memory.most_allocated == 1200 * MIB
    assert memory.reserved == 1400 * MIB


def test_empty_segments_are_given_back_when_the_device_has_no_more() -> None:
    memory = allocator(40, 40, 40, capacity=150 * MIB)
    memory.release(0)
    memory.release(2)
    memory.allocate("a", 80 * MIB)
    assert memory.reserved == 120 * MIB
    assert not memory.overflowed
    assert memory.most_reserved == 120 * MIB
    memory.reset()
    memory.allocate("b", 40 * MIB)
    assert memory.overflowed


@pytest.mark.parametrize("expandable", [False, True])
def test_whatever_comes_and_goes_the_same_again_needs_nothing_new(expandable: bool) -> None:
    memory, chance = Allocator(expandable), random.Random(0)
    orders = [(n, chance.choice([0.1, 3, 8, 15, 70]) * MIB) for n in range(60)]
    reserved = []
    for _ in range(3):
        there = []
        for name, size in orders:
            memory.allocate(name, size)
            there.append(name)
            if name % 3 == 2:
                memory.release(there.pop(name // 3 % len(there)))
            assert memory.allocated <= memory.reserved
        for name in there:
            memory.release(name)
        assert memory.allocated == 0
        reserved.append(memory.reserved)
    assert reserved[1] == reserved[2]
