"""Whatever is done to a file that is read here, the answer is a message or sound data."""

import json
import random
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.data import DataConfig
from fivefold.data import checksums
from fivefold.data.corpus import pieces
from fivefold.data.dataset import Corpus, Dataset
from fivefold.data.indexed import IndexedTokens, write_indexed
from fivefold.data.packing import Packing
from fivefold.data.prepare import prepare
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError
from tests.data.kinds import changed, definition_of

ROWS = ["the cat ☃ sat " * 5, "on", "", "the mat 😀", "x" * 300]
PIECES = (
    *(b"\\ud800", b"\\udc00", b"\\ud800\\u0041", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xfe"),
    *(b"null", b"NaN", b"1e999", b"9" * 5000, b"[" * 3000, b'"', b"\n", b"\0", b"{", b"}"),
)
VALUES = (
    *(None, True, 0, -1, 1.5, 2**31, 2**64, 1e300, "", "x", "\n", "(", [], [1], [[]], {}),
    *({"a": 1}, {"type": "NFC"}, {"type": "Sequence"}, {"type": "Prepend", "prepend": "x"}),
)


def damaged(content, count, seed=1):
    """Flipped bits, ends cut off, pieces replaced and put in."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            place, end = rng.randrange(len(data) + 1), rng.randrange(9)
            match rng.randrange(4):
                case 0 if place < len(data):
                    data[place] ^= 1 << rng.randrange(8)
                case 1:
                    del data[place:]
                case 2:
                    data[place : place + end] = rng.randbytes(rng.randrange(9))
                case _:
                    data[place:place] = rng.choice(PIECES)
        yield bytes(data)


@pytest.fixture(params=[150, pytest.param(3000, marks=pytest.mark.exhaustive)])
def count(request):
    """How many damages."""
    return request.param


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """A sound file of each kind."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("sound")
    lines = [json.dumps({"id": n, "text": row, "m": [1.5, None]}) for n, row in enumerate(ROWS)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfhello\nw\xc3\xb6rld\r\n" * 20)
    table = pyarrow.table({"text": ROWS, "n": range(len(ROWS))})
    parquet.write_table(table, folder / "a.parquet")
    options = {"use_dictionary": False, "row_group_size": 2, "data_page_version": "2.0"}
    parquet.write_table(table, folder / "b.parquet", compression="none", **options)
    with write_indexed(folder / "x", np.uint16) as writer:
        for length in (5, 3, 0, 9, 40):
            writer.add(np.arange(length) + 1)
            if length != 3:
                writer.end_document()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "b.parquet"])
def test_a_damaged_corpus(name, contents, tmp_path, count):
    path = tmp_path / name
    told = 0
    for content in damaged(contents[name], count):
        path.write_bytes(content)
        try:
            for text, _ in pieces(path):
                assert text and text.encode()
        except DataError as error:
            assert str(path) in str(error)
            told += 1
    assert count / 4 < told < count


def test_a_parquet_page_that_fails_its_checksum_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    table = pyarrow.table({"text": ["a text of some length"]})
    parquet.write_table(table, path, write_page_checksum=True, **options)
    path.write_bytes(path.read_bytes().replace(b"text of", b"tent of", 1))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read.*(CRC|checksum)"):
        list(pieces(path))


@pytest.mark.slow
def test_a_damaged_index(contents, tokenizer, tmp_path, count):
    prefix = tmp_path / "x"
    told = 0
    for number, idx in enumerate(damaged(contents["x.idx"], count)):
        (tmp_path / "x.idx").write_bytes(idx if number % 5 else contents["x.idx"])
        (tmp_path / "x.bin").write_bytes(contents["x.bin"] if number % 5 else idx)
        try:
            data = IndexedTokens(prefix)
            starts = data.document_starts
            assert starts[0] == 0 and starts[-1] == len(data.tokens) == data.sequence_starts[-1]
            assert (np.diff(starts) >= 0).all() and (np.diff(data.sequence_starts) >= 0).all()
            corpus = Corpus("x", data)
            options = {"split": "8,2", "part": "train", "seed": 1, "shuffle": True}
            dataset = Dataset([corpus], tokenizer, Packing(4, 0), **options)
            assert dataset.fingerprint
            windows = [dataset.window(sample)[0] for sample in range(dataset.num_samples)]
            assert 0 <= np.min(windows) <= np.max(windows) < tokenizer.vocab_size
        except DataError as error:
            assert (
                str(prefix) in str(error)
                or "x holds token" in str(error)
                or "of x is" in str(error)
            )
            told += 1
    assert count / 2 < told < count


def test_entries_whose_difference_overflows(contents, tmp_path):
    idx = bytearray(contents["x.idx"])
    far = np.array([0, 2**63 - 1, -(2**63), -1, 5], dtype="<i8").tobytes()
    idx[-len(far) :] = far
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(contents["x.bin"])
    with pytest.raises(DataError, match="document entries should rise from 0 to 5"):
        IndexedTokens(tmp_path / "x")


def places(value, path=()):
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@cache
def small_tokenizers():
    """Settings of every kind, vocabularies of a moment."""
    definitions = [definition_of("GPT-2"), definition_of("BERT"), definition_of("T5", "Unigram")]
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    return [changed(definition, truncation=truncation) for definition in definitions]


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(3))
def test_a_damaged_tokenizer(kind, tmp_path, count):
    definition = small_tokenizers()[kind]
    path = tmp_path / "tokenizer.json"
    settings = json.loads(definition)
    everywhere = list(places(settings))
    elsewhere = [p for p in everywhere if not {"vocab", "merges"} & {*p} or len(p) == 2]
    rng = random.Random(kind)
    told = 0
    for number, content in enumerate(damaged(definition.encode(), count, seed=kind)):
        if number % 2:
            place = rng.choice(elsewhere if number % 3 else everywhere)
            values = json.loads(definition)
            inner = values
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = rng.choice(VALUES)
            content = json.dumps(values).encode()
        path.write_bytes(content)
        try:
            tokenizer = Tokenizer.load(path)
            texts = ["the cat </s> <|endoftext|>\n ☃", "", " a"]
            for ids in tokenizer.encode_batch(texts):
                assert not len(ids) or ids.max() < tokenizer.vocab_size
                assert tokenizer.eod_id not in ids
        except DataError as error:
            assert str(path) in str(error)
            told += 1
    assert 0.3 * count < told < count


def test_a_damaged_cache_says_how_to_mend_it(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 40)
    cache_path = tmp_path / "cache"
    config = DataConfig(
        data_path=(f"{tmp_path}/a.txt",),
        tokenizer_vocab_size=280,
        split="1",
        data_cache_path=str(cache_path),
    )
    sound = prepare(config, 16, 1).train.fingerprint
    kept = {path: path.read_bytes() for path in cache_path.iterdir() if path.suffix != ".lock"}
    assert sorted(path.suffix for path in kept) == [".bin", ".crc", ".idx", ".json"]
    for path, content in sorted(kept.items()):
        for bad in (b"", content[: len(content) // 2], None):
            path.unlink() if bad is None else path.write_bytes(bad)
            if bad is None and path.suffix != ".bin":  # remade, or of a cache without checksums
                assert prepare(config, 16, 1).train.fingerprint == sound
                continue
            with pytest.raises(DataError, match="is made again once it is removed") as error:
                prepare(config, 16, 1)
            *_, attempt = str(error.value).split("\n")
            command, flag, *paths = attempt.removeprefix("  try:   ").split()
            assert (command, flag) == ("rm", "-rf") and str(path) in paths
            for name in paths:
                (cache_path / name).unlink(missing_ok=True)
            assert prepare(config, 16, 1).train.fingerprint == sound


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A cache, and what is read from it while its blocks are small."""
    folder = tmp_path_factory.mktemp("cached")
    (folder / "a.txt").write_text(" ".join(f"the {n} cats sat on {n} mats." for n in range(200)))
    config = DataConfig(
        data_path=(f"{folder}/a.txt",),
        tokenizer_vocab_size=280,
        split="8,2",
        data_cache_path=str(folder / "cache"),
    )

    def read():
        data = prepare(config, 16, 1)
        parts = (data.train, data.valid)
        return [part.window(n)[0].tolist() for part in parts for n in range(part.num_samples)]

    return folder / "cache", read


@pytest.mark.parametrize("suffix", ["bin", "idx", "crc"])
def test_any_bit_of_cached_tokens_is_noticed(cached, suffix, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 64)
    (folder, read), rng = cached, random.Random(suffix)
    for path in folder.glob("*"):
        path.unlink()
    sound = read()
    (path,) = folder.glob(f"*.{suffix}")
    whole = path.read_bytes()
    told = 0
    for _ in range(40):
        data, bit = bytearray(whole), rng.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert read() == sound
        except DataError as error:
            *_, attempt = str(error).split("\n")
            assert attempt.startswith("  try:   rm -rf ") and str(path) in attempt
            told += 1
    path.write_bytes(whole)
    assert read() == sound
    assert told == 40


@given(st.integers(1, 60), st.tuples(*[st.none() | st.integers(-70, 70)] * 2), st.integers(1, 40))
@settings(max_examples=60)
def test_what_is_read_is_compared_and_nothing_else(tmp_path_factory, count, ends, step):
    prefix = tmp_path_factory.mktemp("x") / "x"
    tokens = np.arange(count, dtype=np.uint16)
    with patch.object(checksums, "BLOCK", 16):
        with write_indexed(prefix, np.uint16, checksums=True) as writer:
            writer.add(tokens)
            writer.end_document()
        bad = count // 2
        content = bytearray(prefix.with_suffix(".bin").read_bytes())
        content[2 * bad] ^= 1
        prefix.with_suffix(".bin").write_bytes(content)
        part = slice(*ends, step)
        read = IndexedTokens(prefix).checked
        if bad // 8 in {place // 8 for place in range(*part.indices(count))}:
            with pytest.raises(DataError, match="CRC-32"):
                read[part]
        else:
            assert read[part].tolist() == tokens[part].tolist()
