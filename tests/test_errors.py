"""Errors are what they were when another rank has sent them."""

import pickle
from importlib import import_module
from inspect import signature

import pytest

from fivefold.errors import FivefoldError, Mistake

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
