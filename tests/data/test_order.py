from collections import Counter
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.order import Blend, shuffled


@settings(max_examples=60)
@given(size=st.integers(1, 300), key=st.tuples(st.integers(0, 2**40), st.integers(0, 9)))
def test_a_shuffle_takes_everything_once(size, key):
    assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_a_shuffle_is_fixed_for_ever():
    # Checkpoints depend on it: a change here loses the place of every run.
    assert [shuffled(i, 10, (1234, 0, 0)) for i in range(10)] == [9, 6, 0, 5, 4, 3, 7, 8, 1, 2]
    assert shuffled(10**12, 10**12 + 7, (1, 2, 3)) == 144484502649


def test_every_place_and_every_pair_of_neighbours_is_about_as_likely():
    size, trials = 7, 2000
    places, neighbours = Counter(), Counter()
    for epoch in range(trials):
        order = [shuffled(i, size, (5, 0, epoch)) for i in range(size)]
        places.update(enumerate(order))
        neighbours.update(pairwise(order))
    # chi-squared with 49 - 13 and 42 - 1 degrees of freedom: 99.99 % lie below 78 and 85
    assert chi_squared(places, 49, trials * 7) < 78
    assert chi_squared(neighbours, 42, trials * 6) < 85


def chi_squared(counts, cells, total):
    expected = total / cells
    assert len(counts) <= cells
    seen = sum((n - expected) ** 2 / expected for n in counts.values())
    return seen + (cells - len(counts)) * expected


weights = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(
    lambda parts: [Fraction(part) for part in parts]
)


@settings(max_examples=30)
@given(weights=weights)
def test_a_blend_keeps_its_proportions_everywhere(weights):
    blend = Blend(weights)
    total = sum(weights)
    counts = [0] * len(weights)
    for index in range(2 * int(total) + 5):
        corpus, rank = blend[index]
        assert rank == counts[corpus]  # each corpus is read in turn, none of it skipped
        counts[corpus] += 1
        for weight, count in zip(weights, counts, strict=True):
            share = weight / total
            assert abs(count - share * (index + 1)) <= (1 + share * len(weights)) / 2
        if (index + 1) % total == 0:
            assert counts == [(index + 1) * weight / total for weight in weights]


def test_weights_that_need_rounding_stay_close():
    shares = [Fraction(1, 1_000_003), Fraction("0.3333333"), Fraction("0.7")]
    blend = Blend(shares)
    n = 1_000_003
    counts = Counter(blend[index][0] for index in range(n))
    for corpus, share in enumerate(shares):
        assert abs(counts[corpus] - n * share / sum(shares)) < 3


def test_a_far_index_costs_nothing():
    assert Blend([Fraction(3), Fraction(7)])[10**15] == (1, 7 * 10**14)
