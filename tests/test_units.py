"""Numbers with units: never one that a larger unit would say better, never cut from its unit."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fivefold.units import (
    human_bytes,
    human_count,
    human_flops,
    human_seconds,
    several,
    wrapped,
)

POSITIVE = st.floats(1e-9, 1e15, exclude_min=True)
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@given(POSITIVE)
@example(999_999)
@example(1024**2 - 1)
@example(9.996e3)
def test_a_size_has_three_digits_and_the_largest_unit(n: float) -> None:
    for said, base in ((human_count(n), 1000), (human_flops(n), 1000), (human_bytes(n), 1024)):
        number = said.split()[0]
        assert float(number) < base, said
        if "." in number:
            assert len(number.replace(".", "")) == 3, said


@given(POSITIVE)
@example(0.99951)
@example(59.96)
@example(0.00099951)
@example(0.0625)
def test_seconds_are_said_in_the_largest_unit(s: float) -> None:
    said = human_seconds(s)
    if found := re.fullmatch(r"([\d.]+) (us|ms|s)", said):
        number, unit = float(found[1]), found[2]
        assert number < (60 if unit == "s" else 1000), said
        half = 0.5 * SECONDS[unit] * (1 + 1e-9)  # 62.5 ms lies between two, but for a last bit
        assert number * SECONDS[unit] == pytest.approx(s, abs=half)


def test_nothing_is_said_in_whole_units() -> None:
    assert human_seconds(0) == "0 s" and human_bytes(0) == "0 B" and human_count(0) == "0"


def test_one_of_many() -> None:
    assert [several(n, "file") for n in (0, 1, 4096)] == ["0 files", "1 file", "4,096 files"]
    assert several(2, "microbatch") == "2 microbatches"


UNITS = ("KiB", "ms", "M", "%", "s", "GB/s", "GFLOP", "steps")
WORDS = st.sampled_from([*(f"12.5 {unit}" for unit in UNITS), "--micro-batch-size", "a"])


@given(st.lists(WORDS, min_size=1, max_size=30), st.integers(20, 60))
def test_no_number_is_cut_from_its_unit_and_no_flag_in_two(words: list[str], width: int) -> None:
    lines = wrapped(" ".join(words), width, "> ", "  ")
    assert max(map(len, lines)) <= width
    assert " ".join(line[2:] for line in lines) == " ".join(words)
    assert not any(line.endswith(("12.5", "-")) for line in lines)


def test_no_text_is_one_empty_line() -> None:
    assert wrapped("", 60) == [""]
