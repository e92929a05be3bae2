"""Checksums of an index and of blocks of its tokens, which are compared when first read.

A bit that changes on a disk makes another token, of which nothing else would tell. To read a whole
corpus at each start would take minutes; a block takes as long as a few pages.
"""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from fivefold.errors import DataError, Mistake
from fivefold.files import crc32

BLOCK = 1 << 16  # bytes
NO_REMEDY = Mistake("")
"""Of files that nothing here has made."""


class CheckedTokens:
    """Tokens of a file; slicing works as for an array, and checks the blocks it reads.

    Args:
        tokens: all tokens, memory-mapped.
        index: path of their index.
        checksums: path of the file that `write_checksums` has written.
        remedy: what errors of slices say of how to make the files again.

    Raises:
        DataError: the index is not what was written, or there are too few or too many checksums.
    """

    def __init__(self, tokens: np.memmap, index: str, checksums: str, remedy: Mistake) -> None:
        self._tokens, self._remedy = tokens, remedy
        self._block = BLOCK // tokens.itemsize  # in tokens
        sums = np.fromfile(checksums, dtype="<u4")
        count = -(-len(tokens) // self._block)
        if len(sums) != count + 1:
            what = f"{count} blocks and an index"
            raise DataError(f"{checksums} has {len(sums)} checksums, of {what}")
        self._sums, of_index = sums[:-1], int(sums[-1])
        if (found := crc32(np.memmap(index, mode="r"))) != of_index:
            why = f"expected CRC-32 {of_index:08x}, found {found:08x}"
            raise DataError(f"{index} is damaged: {why}")
        self._seen = bytearray(count)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Some tokens.

        Raises:
            DataError: a block of them is not what was written.
        """
        places = range(*part.indices(len(self)))
        if places:
            first, last = places[0] // self._block, places[-1] // self._block
            near = places.step <= self._block
            blocks = range(first, last + 1) if near else {p // self._block for p in places}
            for block in blocks:
                if not self._seen[block]:
                    self._check(block)
        return self._tokens[part]

    def _check(self, block: int) -> None:
        content = self._tokens[block * self._block : (block + 1) * self._block].view(np.uint8)
        found, expected = crc32(content), int(self._sums[block])
        if found != expected:
            start = block * BLOCK
            what = (
                f"{self._tokens.filename} is damaged: bytes {start:,} to {start + len(content):,}: "
                f"expected CRC-32 {expected:08x}, found {found:08x}"
            )
            raise DataError(replace(self._remedy, what=what))
        self._seen[block] = 1


class TokenArray(Protocol):
    """A sequence of tokens whose slices are arrays."""

    def __len__(self) -> int:
        """The number of tokens."""

    def __getitem__(self, part: slice) -> np.ndarray:
        """A slice of the tokens."""


def write_checksums(path: Path, tokens: Path, index: Path) -> None:
    """Write the checksums of the blocks of a file of tokens, and of its index."""
    with open(tokens, "rb") as file:
        sums = [crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
    sums.append(crc32(index.read_bytes()))
    path.write_bytes(np.array(sums, dtype="<u4").tobytes())
