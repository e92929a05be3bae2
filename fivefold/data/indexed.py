"""Reads and writes Megatron-LM's token files: `PREFIX.bin` (tokens), `PREFIX.idx` (the index).

The layout is that of `IndexedDataset` in Megatron-LM, version 1, little-endian:

    idx:  9s "MMIDIDX\\0\\0" | u64 version | u8 dtype code | u64 sequences | u64 document entries
          i32 length of each sequence, in tokens
          i64 first byte of each sequence in the bin
          i64 document entries: 0, then the number of sequences up to the end of each document
          [i8 mode of each sequence: multimodal files only]
    bin:  the tokens of every sequence, one after the other
"""

import os
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fivefold.data.checksums import NO_REMEDY, CheckedTokens, TokenArray, write_checksums
from fivefold.errors import DataError, Mistake
from fivefold.files import atomic_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CHECKSUMS = ".crc"
_LONGEST_SEQUENCE = (1 << 31) - 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


def is_indexed(prefix: str) -> bool:
    """Whether either file of a `.bin/.idx` pair is at this prefix."""
    return any(os.path.exists(prefix + suffix) for suffix in (".idx", ".bin"))


class IndexedTokens:
    """A `.bin/.idx` pair, read through memory maps.

    Attributes:
        tokens: all tokens of the corpus in order, [tokens], memory-mapped.
        checked: the same, of which slices are compared with checksums if the files have some.
        sequence_starts: index of the first token of each sequence, then the number of tokens;
            int64, [sequences + 1].
    """

    def __init__(self, prefix: str | os.PathLike[str], remedy: Mistake = NO_REMEDY) -> None:
        """Open and check a pair; errors in what is read later say what `remedy` does.

        Raises:
            DataError: a file is missing, cut short, corrupt or of another format.
        """
        self.prefix, self._remedy = os.fspath(prefix), remedy
        idx, bin_ = f"{self.prefix}.idx", f"{self.prefix}.bin"
        for path in (idx, bin_):
            if not os.path.isfile(path):
                why = "indexed data is a pair of files, PREFIX.bin and PREFIX.idx"
                raise DataError(Mistake(f"no such file: {path}", (why,)))
        try:
            self._open(idx, bin_)
        except OSError as error:
            raise DataError(f"{error.filename or idx} cannot be read: {error.strerror}") from error

    def _open(self, idx: str, bin_: str) -> None:
        dtype, lengths, pointers, documents = _read_index(idx)
        starts = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        count = int(starts[-1])
        _check_index(idx, dtype, lengths, pointers, documents, starts)
        found, expected = os.path.getsize(bin_), count * dtype.itemsize
        if found != expected:
            why = (
                f"{count} tokens x {dtype.itemsize} bytes ({dtype.name}) = {expected} bytes, "
                f"{abs(found - expected)} too {'few' if found < expected else 'many'}",
                "copy or make both files again, in one run of the preprocessing",
            )
            what = f"{bin_} has {found} bytes where its index needs {expected}"
            raise DataError(Mistake(what, why))
        if not count:
            raise DataError(f"{bin_} holds no tokens")
        self.tokens = np.memmap(bin_, dtype=dtype, mode="r")
        self.checked: TokenArray = self.tokens
        if os.path.exists(checksums := f"{self.prefix}{CHECKSUMS}"):
            self.checked = CheckedTokens(self.tokens, idx, checksums, self._remedy)
        self.sequence_starts = starts
        self._documents = documents

    @property
    def document_starts(self) -> np.ndarray:
        """Index of each document's first token, then the number of tokens; [documents + 1]."""
        return self.sequence_starts[self._documents]

    @property
    def num_documents(self) -> int:
        """Number of documents in the corpus."""
        return len(self._documents) - 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the corpus."""
        return len(self.sequence_starts) - 1


def _read_index(path: str) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """The dtype of the tokens, and memory-mapped lengths, pointers and document entries."""
    size = os.path.getsize(path)
    if size < HEADER.size:
        raise DataError(f"{path} is cut short: {size} bytes, its header alone has {HEADER.size}")
    with open(path, "rb") as file:
        magic, version, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
    if magic != MAGIC:
        raise DataError(
            f"{path} is not a Megatron-LM index: it starts with {magic!r}, not {MAGIC!r}"
        )
    if version != VERSION:
        raise DataError(f"{path} is an index of version {version}; only version {VERSION} is known")
    dtype = DTYPES.get(code)
    if dtype is None or dtype.kind == "f":
        integers = ", ".join(f"{c} {d.name}" for c, d in DTYPES.items() if d.kind != "f")
        raise DataError(f"{path} has dtype code {code}; tokens are one of {integers}")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if size not in (expected, expected + sequences):  # the latter: with multimodal modes
        why = (
            f"{HEADER.size} + {sequences} sequences x (4 + 8) + {entries} document entries x 8 "
            f"= {expected} bytes",
            "copy the file again, or run the preprocessing again",
        )
        raise DataError(
            Mistake(f"{path} has {size} bytes where its header asks for {expected}", why)
        )
    content = np.memmap(path, mode="r")
    lengths, pointers, documents = np.split(
        content[HEADER.size : expected], [4 * sequences, 12 * sequences]
    )
    return dtype, lengths.view("<i4"), pointers.view("<i8"), documents.view("<i8")


def _check_index(
    path: str,
    dtype: np.dtype,
    lengths: np.ndarray,
    pointers: np.ndarray,
    documents: np.ndarray,
    starts: np.ndarray,
) -> None:
    """Raise DataError unless sequences follow each other and documents cover them."""
    if len(lengths) and lengths.min() < 0:
        bad = int(np.argmin(lengths))
        raise DataError(f"{path} is corrupt: sequence {bad} has {lengths[bad]} tokens")
    wanted = starts[:-1] * dtype.itemsize
    if (pointers != wanted).any():
        bad = int(np.argmax(pointers != wanted))
        raise DataError(
            f"{path} is corrupt: sequence {bad} should start at byte {wanted[bad]} "
            f"(after {wanted[bad] // dtype.itemsize} tokens of {dtype.itemsize} bytes), "
            f"it says {pointers[bad]}"
        )
    covered = len(documents) and documents[0] == 0 and documents[-1] == len(lengths)
    if not covered or (documents[1:] < documents[:-1]).any():  # a difference could overflow
        raise DataError(
            f"{path} is corrupt: its document entries should rise from 0 to {len(lengths)} "
            f"sequences, they are {documents[:3].tolist()}...{documents[-3:].tolist()}"
        )


class IndexedWriter:
    """Collects sequences and documents; `write_indexed` creates it."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)
        self._code = {known: code for code, known in DTYPES.items()}[self._dtype]
        self._lengths = array("i")
        self._documents = array("q", [0])

    def add(self, tokens: np.ndarray, *, continues: bool = False) -> None:
        """Append one sequence of tokens to the current document.

        With `continues` the tokens are added to the last sequence, as long as its length fits into
        the 32 bits of the format.
        """
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        if continues and self._lengths[-1] + len(tokens) <= _LONGEST_SEQUENCE:
            self._lengths[-1] += len(tokens)
        else:
            self._lengths.append(len(tokens))

    def end_document(self) -> None:
        """End a document: the sequences added since the last call belong to it."""
        self._documents.append(len(self._lengths))

    def write_index(self, path: Path) -> None:
        """Write the .idx file of the sequences that were added."""
        lengths = np.array(self._lengths, dtype="<i4")
        documents = np.array(self._documents, dtype="<i8")
        pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * self._dtype.itemsize
        with open(path, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
            for part in (lengths, pointers, documents):
                file.write(part.tobytes())


@contextmanager
def write_indexed(
    prefix: str | os.PathLike[str],
    dtype: np.dtype | type[np.integer],
    *,
    checksums: bool = False,
) -> Iterator[IndexedWriter]:
    """Write a `.bin/.idx` pair, which appears as a whole when the `with` block succeeds.

    With `checksums`, there is a third file of them, which Megatron-LM does not know.
    """
    base = os.fspath(prefix)
    # The idx is replaced last: where it is, the pair is whole.
    with atomic_path(f"{base}.idx") as idx, atomic_path(f"{base}.bin") as bin_:
        with open(bin_, "wb") as file:
            writer = IndexedWriter(file, np.dtype(dtype))
            yield writer
        writer.write_index(idx)
        if checksums:
            with atomic_path(f"{base}{CHECKSUMS}") as sums:
                write_checksums(sums, bin_, idx)
