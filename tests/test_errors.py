"""Errors arrive as another rank has sent them, and are laid out in one place."""

import ast
import difflib
import pickle
from importlib import import_module
from inspect import signature
from pathlib import Path
from random import Random

import pytest

from fivefold.errors import FivefoldError, Mistake, closest

import_module("fivefold.train.run")  # and with it the rooms that have errors of their own
VALUES = {"status": 1, "intact": 3, "what": "what"}
MISTAKE = Mistake("what", ("why",), ("--works",), "attempt")


def kinds(of: type[FivefoldError]) -> list[type[FivefoldError]]:
    return [of, *(kind for under in of.__subclasses__() for kind in kinds(under))]


@pytest.mark.parametrize("kind", kinds(FivefoldError), ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_it_was_sent(kind: type[FivefoldError]) -> None:
    sent = kind(*(VALUES.get(name, MISTAKE) for name in signature(kind).parameters))
    arrived = pickle.loads(pickle.dumps(sent))
    assert type(arrived) is kind
    assert str(arrived) == str(sent) and vars(arrived) == vars(sent)


def test_the_closest_choice_is_difflibs() -> None:
    random, found = Random(1), 0
    for _ in range(300):
        choices = {"".join(random.choices("abc_", k=random.randrange(1, 9))) for _ in range(30)}
        word = "".join(random.choices("abc_", k=random.randrange(9)))
        for least in (0.3, 0.6, 0.85):
            known = difflib.get_close_matches(word, choices, 1, least)
            assert closest(word, choices, least) == (known[0] if known else None), word
            found += bool(known)
    assert 300 < found < 900


def test_only_mistakes_lay_lines_out() -> None:
    """What is wrong, why, and what works are fields, which callers may add to or change."""
    broken = [
        f"{path.name}:{text.lineno}"
        for path in (Path(__file__).parents[1] / "fivefold").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "Mistake"))
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and "\n" in text.value
    ]
    assert not broken
