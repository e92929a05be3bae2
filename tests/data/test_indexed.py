import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.indexed import DTYPES, IndexedTokens, write_indexed
from fivefold.errors import DataError

# Two documents, the first of two sequences: [[5, 6, 7], [8]], [[9, 10]]; spelt out by hand from
# Megatron-LM's _IndexWriter.
IDX = b"".join(
    [
        b"MMIDIDX\x00\x00",
        struct.pack("<Q", 1),
        struct.pack("<B", 8),  # uint16
        struct.pack("<Q", 3),
        struct.pack("<Q", 3),
        struct.pack("<3i", 3, 1, 2),
        struct.pack("<3q", 0, 6, 8),
        struct.pack("<3q", 0, 2, 3),
    ]
)
BIN = struct.pack("<6H", 5, 6, 7, 8, 9, 10)


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "x.idx").write_bytes(IDX)
    (tmp_path / "x.bin").write_bytes(BIN)
    return tmp_path / "x"


def test_the_bytes_are_megatrons(tmp_path):
    with write_indexed(tmp_path / "x", np.uint16) as writer:
        writer.add(np.array([5, 6, 7]))
        writer.add(np.array([8]))
        writer.end_document()
        writer.add(np.array([9, 10]))
        writer.end_document()
    assert (tmp_path / "x.idx").read_bytes() == IDX
    assert (tmp_path / "x.bin").read_bytes() == BIN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_megatrons_bytes_are_read(prefix):
    data = IndexedTokens(prefix)
    assert data.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert data.document_starts.tolist() == [0, 4, 6]
    assert data.num_documents == 2


def test_multimodal_modes_are_passed_over(prefix):
    prefix.with_suffix(".idx").write_bytes(IDX + b"\x00\x01\x00")
    assert IndexedTokens(prefix).document_starts.tolist() == [0, 4, 6]


@settings(max_examples=50)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=9).filter(
        any
    ),
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
)
def test_what_is_written_is_read(write_documents, documents, code):
    data = write_documents(documents, DTYPES[code])
    assert data.tokens.dtype == DTYPES[code]
    read = [data.tokens[a:b].tolist() for a, b in pairwise(data.document_starts)]
    assert read == documents


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(prefix):
    with pytest.raises(KeyError), write_indexed(prefix, np.uint16) as writer:
        writer.add(np.array([1]))
        raise KeyError
    assert prefix.with_suffix(".idx").read_bytes() == IDX
    assert prefix.with_suffix(".bin").read_bytes() == BIN
    assert len(list(prefix.parent.iterdir())) == 2


def patched(data, offset, value):
    return data[:offset] + value + data[offset + len(value) :]


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"", "cut short: 0 bytes, its header alone has 34"),
        (IDX[:33], "cut short: 33 bytes"),
        (b"TNTIDX" + IDX[6:], "not a Megatron-LM index"),
        (patched(IDX, 9, b"\x02"), "version 2"),
        (patched(IDX, 17, b"\x07"), "dtype code 7; tokens are one of 1 uint8"),
        (patched(IDX, 17, b"\x2a"), "dtype code 42"),
        (
            IDX[:-1],
            r"93 bytes where its header asks for 94\n  34 \+ 3 sequences x \(4 \+ 8\) "
            r"\+ 3 document entries x 8 = 94 bytes",
        ),
        (patched(IDX, 34, struct.pack("<i", -3)), "sequence 0 has -3 tokens"),
        (
            patched(IDX, 46 + 8, struct.pack("<q", 4)),
            r"sequence 1 should start at byte 6 \(after 3 tokens of 2 bytes\), it says 4",
        ),
        (patched(IDX, 70 + 16, struct.pack("<q", 2)), "rise from 0 to 3 sequences"),
        (patched(IDX, 70 + 8, struct.pack("<q", 4)), "rise from 0 to 3 sequences"),
    ],
)
def test_a_corrupt_index_is_refused(prefix, idx, message):
    prefix.with_suffix(".idx").write_bytes(idx)
    with pytest.raises(DataError, match=message):
        IndexedTokens(prefix)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BIN[:-1], r"11 bytes where its index needs 12\n  6 tokens x 2 bytes .* 1 too few"),
        (BIN + b"\x00\x00", "14 bytes where its index needs 12(.|\n)*2 too many"),
    ],
)
def test_a_bin_of_the_wrong_size_is_refused(prefix, content, message):
    prefix.with_suffix(".bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedTokens(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_one_file_of_the_pair_is_not_enough(prefix, suffix):
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(DataError, match=f"no such file: .*x{suffix}"):
        IndexedTokens(prefix)


def test_no_tokens_are_refused(tmp_path):
    with write_indexed(tmp_path / "x", np.uint16) as writer:
        writer.end_document()
    with pytest.raises(DataError, match="holds no tokens"):
        IndexedTokens(tmp_path / "x")


def test_tokens_beyond_four_gibibytes_are_found(tmp_path):
    lengths = np.array([2**31 - 1, 2**31 - 1, 10], dtype="<i4")
    pointers = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    parts = (lengths, pointers, np.array([0, 1, 2, 3], dtype="<i8"))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    (tmp_path / "x.idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    with open(tmp_path / "x.bin", "wb") as file:  # almost all of it a hole
        file.seek(2 * (2**32 - 2))
        file.write(struct.pack("<10H", *range(10)))
    data = IndexedTokens(tmp_path / "x")
    assert data.document_starts.tolist() == [0, 2**31 - 1, 2**32 - 2, 2**32 + 8]
    assert data.tokens[data.document_starts[2] :].tolist() == list(range(10))


def test_a_long_document_is_one_sequence_as_long_as_the_format_can_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("fivefold.data.indexed._LONGEST_SEQUENCE", 5)
    with write_indexed(tmp_path / "x", np.uint16) as writer:
        writer.add(np.arange(3))
        writer.add(np.arange(2), continues=True)
        writer.add(np.arange(4), continues=True)
        writer.end_document()
    data = IndexedTokens(tmp_path / "x")
    assert data.sequence_starts.tolist() == [0, 5, 9]
    assert data.document_starts.tolist() == [0, 9]


def test_a_file_that_may_not_be_read_is_named(prefix, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"x\.idx cannot be read: Permission denied"):
        IndexedTokens(prefix)
