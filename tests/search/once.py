"""Searches that are made once for each question: tests of how a plan is told ask the same again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fivefold.search import search
from fivefold.tell import explain


def once(search: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, run once for each question."""
    known: dict[str, Any] = {}

    def found(request: Any) -> Any:
        key = repr(request)
        if key not in known:
            known[key] = search(request)
        return known[key]

    return found


@contextmanager
def searching_once() -> Iterator[None]:
    """Of `fivefold plan` and its `--why`, in this process."""
    found = once(search.search)
    with patch.object(search, "search", found), patch.object(explain, "search", found):
        yield
