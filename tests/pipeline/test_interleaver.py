"""Two halves of a pair alternate, and fail together."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.pipeline.run.interleaver import Interleaver, OtherHalfFailed


def half(turns: Interleaver, seen: list[str], name: str, pieces: int) -> Callable[[], None]:
    def run() -> None:
        for piece in range(pieces):
            seen.append(f"{name}{piece}")
            turns.give_way()

    return run


@pytest.mark.parametrize(("first", "second"), [(3, 3), (1, 4), (4, 1), (0, 2), (2, 0), (0, 0)])
def test_each_goes_on_until_it_gives_way(first: int, second: int) -> None:
    turns, seen = Interleaver(torch.device("cpu")), list[str]()
    for _ in range(2):
        seen.clear()
        between = list[int]()
        turns.run(
            half(turns, seen, "a", first),
            half(turns, seen, "b", second),
            between=lambda: between.append(len(seen)),  # noqa: B023
        )
        both = min(first, second)
        alternating = [name for piece in range(both) for name in (f"a{piece}", f"b{piece}")]
        rest = [f"{n}{p}" for n, last in (("a", first), ("b", second)) for p in range(both, last)]
        assert seen == alternating + rest
        assert len(between) == first
    turns.give_way()  # alone, nothing happens
    assert len(seen) == first + second


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("failing", ["first", "second"])
def test_the_half_that_fails_is_told_and_ends_the_other(failing: str, place: int) -> None:
    turns, unwound = Interleaver(torch.device("cpu")), list[str]()

    def run(name: str) -> None:
        try:
            for piece in range(3):
                if name == failing and piece == place:
                    raise ValueError(f"{name} at {piece}")
                turns.give_way()
        except OtherHalfFailed:
            unwound.append(name)
            raise

    with pytest.raises(ValueError, match=f"{failing} at {place}"):
        turns.run(lambda: run("first"), lambda: run("second"))
    assert failing not in unwound
    turns.run(lambda: unwound.append("later"), lambda: None)  # it can be used again
    assert unwound[-1] == "later"


def test_what_pytorch_keeps_for_a_thread_holds_in_both_halves() -> None:
    turns, names = Interleaver(torch.device("cpu")), list[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    modes = []
    with torch.no_grad(), Counting():
        turns.run(lambda: None, lambda: modes.append((torch.ones(2) + 1).requires_grad))
        turns.run(lambda: None, lambda: modes.append(torch.is_grad_enabled()))
    turns.run(lambda: None, lambda: modes.append(torch.is_grad_enabled()))
    assert modes == [False, False, True]
    assert "aten.add.Tensor" in names
