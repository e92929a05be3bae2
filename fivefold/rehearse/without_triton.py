"""Lets a rehearsal take the way of our Triton kernels where Triton is not installed.

On shapes `mesh.device.launch` runs no kernel, so that modules with kernels need Triton only to be
imported.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

KERNELS = (
    "fivefold.data_parallel.quantised_kernels",
    "fivefold.memory.loss_kernels",
    "fivefold.model.kernels.attention",
    "fivefold.model.kernels.caps",
    "fivefold.model.kernels.dropout",
    "fivefold.model.kernels.gates",
    "fivefold.model.kernels.norms",
    "fivefold.model.kernels.quantise",
    "fivefold.model.kernels.rotary",
    "fivefold.optim.adamw_kernels",
)
"""Modules that import Triton, or import one that does."""


def import_kernels() -> None:
    """Import the modules of our kernels, with something in place of Triton if it is missing.

    It is gone when they are there: torch and others shall not find it.
    """
    if find_spec("triton") is None:
        with _in_place_of_triton():
            for name in KERNELS:
                import_module(name)


@contextmanager
def _in_place_of_triton() -> Iterator[None]:
    triton: Any = ModuleType("triton")
    triton.language = _Language("triton.language")
    triton.jit = lambda function: function
    triton.cdiv = lambda amount, part: -(-amount // part)
    triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    sys.modules |= {"triton": triton, "triton.language": triton.language}
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


class _Language(ModuleType):
    """Has every name: types of kernels' arguments, which nothing reads."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        """A constant of a kernel."""
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object
