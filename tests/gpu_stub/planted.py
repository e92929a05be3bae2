"""Waits that are left out, to see that their lack is found."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fivefold.audit.watch import replaced
from fivefold.memory.host import HostLink
from fivefold.mesh.collectives import Messages, Pending
from fivefold.pipeline.run.messages import StepMessages


def _nothing(*_: Any) -> None:
    """Does not wait."""


FORGOTTEN: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "collectives": lambda: replaced(Pending, "wait", lambda pending: pending.finish()),
    "messages": lambda: replaced(Messages, "wait", _nothing),
    "stages": lambda: replaced(StepMessages, "wait", _nothing),
    "copies": lambda: replaced(HostLink, "wait", _nothing),
    "streams": lambda: replaced(torch.cuda.Stream, "wait_stream", _nothing),
    "events": lambda: replaced(torch.cuda.Stream, "wait_event", _nothing),
    "owners": lambda: replaced(torch.Tensor, "record_stream", _nothing),
}
"""Name of what is forgotten -> a block in which it is."""
