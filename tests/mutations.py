"""Files as other hands leave them: text with a few places changed, of every kind of damage."""

import random
import re
from collections.abc import Iterator
from functools import lru_cache

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_WORD = re.compile(rb"[A-Za-z_]+")
VALUES = (
    *(b"0", b"-1", b"1", b"2", b"7", b"1.5", b"-0.0", b"nan", b"inf", b"-inf", b"1e999", b"1e-320"),
    *(b"1e300", b"999999999999", b"9" * 5_000, b"true", b"null", b"[]", b"{}", b'""', b'"1"', b""),
    *(b"text", b"0x10", b"1_0", "\N{ARABIC-INDIC DIGIT THREE}".encode(), b"[" * 2_000, b"1 (2)"),
)
_PIECES = (b"\x00", b"\xff", b"\n", b'"', b",", b"=", b"[", b"]", b"{", b"#", b"&", b"\r", b"\xef")


def mutations(text: str, count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` variants of a text, one to three changes each; the same for the same seed."""
    for number in range(count):
        rng = random.Random(seed * count + number)
        data = text.encode()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = rng.choice(_CHANGES)(data, rng)
        yield data


def _token(pattern: re.Pattern[bytes], data: bytes, rng: random.Random) -> tuple[int, int]:
    places = _places(pattern, data)
    return rng.choice(places) if places else (0, 0)


@lru_cache(64)  # of the text itself, which each variant begins with
def _places(pattern: re.Pattern[bytes], data: bytes) -> list[tuple[int, int]]:
    return [found.span() for found in pattern.finditer(data)]


def _number(data: bytes, rng: random.Random) -> bytes:
    start, end = _token(_NUMBER, data, rng)
    return data[:start] + rng.choice(VALUES) + data[end:]


def _word(data: bytes, rng: random.Random) -> bytes:
    start, end = _token(_WORD, data, rng)
    other = data[slice(*_token(_WORD, data, rng))]
    return data[:start] + rng.choice((other, *VALUES)) + data[end:]


def _line(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    change = rng.randrange(3)
    if change == 0:
        del lines[place]
    elif change == 1:
        lines.insert(other, lines[place])
    else:
        lines[place], lines[other] = lines[other], lines[place]
    return b"\n".join(lines)


def _byte(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    piece = rng.choice((*_PIECES, bytes([rng.randrange(256)]), b""))
    return data[:place] + piece + data[place + rng.randrange(2) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


_CHANGES = (_number, _number, _number, _word, _line, _byte, _cut)
