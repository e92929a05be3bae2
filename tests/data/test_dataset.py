import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.dataset import Corpus, Dataset, parse_split, split_bounds
from fivefold.data.indexed import IndexedTokens, write_indexed
from fivefold.data.packing import Packing
from fivefold.errors import ConfigError, DataError

EOD = 0


@pytest.fixture
def make(tokenizer, write_documents):
    def make(*documents_of, weights=None, seq_length=4, split="1", part="train", **options):
        corpora = [
            Corpus(f"corpus{c}", write_documents(documents), weights and Fraction(weights[c]))
            for c, documents in enumerate(documents_of)
        ]
        options = {"seed": 7, "shuffle": True} | options
        packing = Packing(seq_length, EOD)
        return Dataset(corpora, tokenizer, packing, split=split, part=part, **options)

    return make


def counting(first, length):
    """A document whose tokens tell where they are."""
    return list(range(first, first + length))


def test_unshuffled_samples_tile_the_stream(make):
    dataset = make([[*counting(1, 9), EOD], [*counting(20, 6), EOD]], shuffle=False)
    stream = [*counting(1, 9), EOD, *counting(20, 6), EOD]
    assert dataset.num_samples == 4  # (17 - 1) // 4
    for sample in range(4):
        assert dataset.window(sample)[0].tolist() == stream[4 * sample : 4 * sample + 5]
        assert dataset.window(sample + 4)[0].tolist() == dataset.window(sample)[0].tolist()


def test_each_epoch_takes_every_sample_once_in_another_order(make):
    dataset = make([counting(1, 201)])
    epochs = [[dataset.window(50 * e + i)[0][0] for i in range(50)] for e in range(3)]
    assert all(sorted(epoch) == list(range(1, 200, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != sorted(epochs[0])


def test_the_seed_decides_the_order(make):
    orders = [
        [make([counting(1, 201)], seed=seed).locate(i) for i in range(50)] for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_a_blend_takes_corpora_by_weight_and_wraps_the_small_one(make):
    dataset = make([counting(1, 41)], [counting(100, 9)], weights=("0.3", "0.7"))
    located = [dataset.locate(i) for i in range(1000)]
    assert Counter(corpus for corpus, _ in located) == {0: 300, 1: 700}
    assert Counter(sample for corpus, sample in located if corpus) == {0: 350, 1: 350}


def test_without_weights_every_sample_comes_once(make):
    dataset = make([counting(1, 41)], [counting(100, 13)])
    assert dataset.num_samples == 13
    located = {dataset.locate(i) for i in range(13)}
    assert located == {(0, i) for i in range(10)} | {(1, i) for i in range(3)}


def test_a_microbatch_holds_the_samples_asked_for(make):
    dataset = make([[*counting(1, 30), EOD, *counting(40, 30), EOD]])
    batch = dataset.microbatch([3, 40])
    for row, index in enumerate((3, 40)):
        assert batch.tokens_BS[row].tolist() == dataset.window(index)[0][:-1].tolist()
        assert batch.token_ids_BS[row].tolist() == counting(4 * index, 4)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    parts=st.lists(st.integers(0, 100), min_size=1, max_size=3).filter(any),
)
def test_splits_partition_the_corpus(write_documents, lengths, parts):
    data = write_documents([counting(1, length) for length in lengths])
    shares = parse_split(",".join(map(str, parts)))
    bounds = split_bounds(data, shares)
    assert bounds[0] == 0 and bounds[-1] == sum(lengths)
    assert bounds == sorted(bounds)
    counts = [round(sum(shares[:i]) * len(lengths)) for i in range(4)]
    if all(b > a for a, b, share in zip(counts, counts[1:], shares, strict=False) if share):
        assert set(bounds) <= set(data.document_starts.tolist())


def megatron_bounds(split, elements):
    """Begin and end of each split, None if it has no share, as Megatron-LM has them: restated from
    parse_and_normalize_split, convert_split_vector_to_split_matrix and the dataset builder."""
    weights = [float(number) for number in re.findall("[.0-9]+", split)]
    weights += [0.0] * (3 - len(weights))
    total = weights[0] + weights[1] + weights[2]
    train, valid, test = (weight / total for weight in weights)
    books = [(0, train), (train, train + valid), (train + valid, train + valid + test)]
    return [
        None if end <= begin else tuple(round(edge * float(elements)) for edge in (begin, end))
        for begin, end in books
    ]


def sequences(count, tokens_each=1):
    """What `split_bounds` asks of an index, for any number of sequences."""
    starts = range(0, count * tokens_each + 1, tokens_each)
    return SimpleNamespace(
        num_sequences=count, sequence_starts=starts, tokens=range(count * tokens_each)
    )


numbers = st.one_of(
    st.integers(0, 1000).map(str),
    st.sampled_from(["0", "90", "5", "969", "30", "1", "50", "25", ".5", "0.05", "98.5", "7."]),
    st.decimals(0, 100, places=17, allow_nan=False, allow_infinity=False).map("{:f}".format),
)
splits = st.lists(numbers, min_size=1, max_size=3).filter(lambda s: any(map(float, s)))


@pytest.mark.slow
@settings(max_examples=150)
@given(split=splits, count=st.one_of(st.integers(1, 2000), st.integers(1, 2**31)))
def test_splits_are_megatrons(split, count):
    text = ",".join(split)
    expected = megatron_bounds(text, count)
    bounds = split_bounds(sequences(count, 3), parse_split(text))
    assert bounds[0] == 0 and bounds[-1] == 3 * count and bounds == sorted(bounds)
    if any(part is not None and part[0] == part[1] for part in expected):
        expected = megatron_bounds(text, 3 * count)  # on which it hangs: here tokens are cut
    else:
        expected = [part and (3 * part[0], 3 * part[1]) for part in expected]
    assert [e and b for e, b in zip(expected, pairwise(bounds), strict=True)] == expected


@pytest.mark.parametrize(
    ("split", "documents", "counts"),
    [
        ("90,5,5", 30, [27, 2, 1]),  # 28.5 exactly, a little more in floats
        ("969,30,1", 1000, [969, 30, 1]),
        ("1,1", 5, [2, 3, 0]),
    ],
)
def test_ties_go_as_floats_do(split, documents, counts):
    bounds = split_bounds(sequences(documents), parse_split(split))
    assert [last - first for first, last in pairwise(bounds)] == counts


def test_documents_are_split_as_megatron_does(write_documents):
    data = write_documents([[1, 2]] * 1000)
    assert split_bounds(data, parse_split("969,30,1")) == [0, 2 * 969, 2 * 999, 2000]


def test_sequences_are_split_not_documents(tmp_path):
    with write_indexed(tmp_path / "x", np.uint16) as writer:
        for _ in range(2):
            for length in (3, 1, 1, 1, 4):
                writer.add(np.ones(length))
            writer.end_document()
    data = IndexedTokens(tmp_path / "x")
    assert (data.num_documents, data.num_sequences) == (2, 10)
    assert split_bounds(data, parse_split("70,30")) == [0, 14, 20, 20]


def test_a_single_document_is_cut(write_documents):
    data = write_documents([counting(1, 100)])
    assert split_bounds(data, parse_split("90,10")) == [0, 90, 100, 100]


def test_no_training_token_is_in_validation(make):
    documents = [[*counting(1, 99), EOD] for _ in range(20)]
    for number, document in enumerate(documents):
        document[:99] = [100 + number] * 99
    seen = [
        {token for i in range(d.num_samples) for token in d.window(i)[0].tolist()} - {EOD}
        for d in (make(documents, split="80,20", part=part) for part in ("train", "valid"))
    ]
    assert seen == [set(range(100, 116)), set(range(116, 120))]


@pytest.mark.parametrize(
    "split",
    [
        *("", "a", "1,2,3,4", "-1,2", "0,0,0", "1/0", "nan", "inf"),
        *("1e-3,1", "1/2,1/2", ".", "9" * 400, "1,,2", "1 2", "٣", f"{'9' * 308},{'9' * 308}"),
    ],
)
def test_bad_splits_are_refused(split):
    with pytest.raises(ConfigError, match="is not up to three shares, of train, valid, test"):
        parse_split(split)


def test_a_split_too_short_says_what_it_has_and_needs(make):
    with pytest.raises(DataError) as error:
        make([counting(1, 100)], split="90,9,1", part="valid", seq_length=16)
    assert str(error.value) == (
        "the valid split of corpus0 is too short: 9 tokens, and one sample needs 17 "
        "(seq_length 16 + 1 to predict)\n"
        "  split 90,9,1 of 100 tokens in 1 document\n"
        "  a share of at least 17.00% would do for valid\n"
        "  works: --seq-length 8"
    )
    for split, count, last in (
        ("1", 100, "  a share of at least 17.00% would do for valid"),
        ("1", 16, "  split 1 of 16 tokens in 1 document; more text is needed"),
    ):
        with pytest.raises(DataError) as error:
            make([counting(1, count)], split=split, part="valid", seq_length=16)
        assert str(error.value).splitlines()[-1] == last
    assert make([counting(1, 100)], split="90,9,1", part="valid", seq_length=8).num_samples == 1
    with pytest.raises(DataError, match="9 tokens, and one sample needs 10"):
        make([counting(1, 100)], split="90,9,1", part="valid", seq_length=9)


def test_a_token_beyond_the_vocabulary_is_found(make, tokenizer):
    size = tokenizer.vocab_size
    dataset = make([[*counting(1, 8), size - 1, size]], shuffle=False)
    assert dataset.window(0)[0][-1] == 5
    dataset = make([[*counting(1, 4), size]], shuffle=False)
    with pytest.raises(DataError, match=f"corpus0 holds token {size}; .* 0 to {size - 1}\n"):
        dataset.window(0)


def test_the_fingerprint_changes_with_all_that_matters(make):
    text = [counting(1, 60)]
    base = make(text).fingerprint
    others = [
        make(text, seed=8),
        make(text, seq_length=5),
        make(text, split="9,1"),
        make(text, shuffle=False),
        make(text, weights=("1",)),
        make([counting(2, 60)]),
        make([counting(1, 30), counting(31, 30)]),
        make(text, text),
    ]
    assert base == make(text).fingerprint
    assert all(other.fingerprint != base for other in others)
