"""Observes every tensor operation of this process."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs an operation with its arguments and keyword arguments."""
_DEVICE = torch.ops.prim.device.default
ROOT = str(Path(__file__).resolve().parents[1])


def _execute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


class Watch:
    """Observes operations on plain tensors inside its block, including those of a backward."""

    def __init__(self) -> None:
        self._go_on: Run = _execute

    def begin(self, block: ExitStack) -> None:
        """Start observing whatever else the subclass observes, until the block ends."""

    def __enter__(self) -> Self:
        self._block = watching(self)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def _observes(self, func: Any) -> bool:
        """Whether the operation concerns this observer; called for every operation, so it must be
        quick."""
        return True

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation; subclasses observe it before or after."""
        return self._go_on(func, args, kwargs)

    def ask(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, observed if it concerns this observer."""
        return (self._run if self._observes(func) else self._go_on)(func, args, kwargs)

    def before(self, go_on: Run) -> Run:
        """How operations run when this observer passes them to another one."""
        self._go_on = go_on
        return self.ask


@contextmanager
def watching(*watches: Watch) -> Iterator[None]:
    """Several observers of the operations in the block; the last one is asked first.

    They are one dispatch mode: each mode costs every operation a detour through PyTorch, which
    takes longer than the observation.
    """
    run: Run = _execute
    with ExitStack() as stack:
        for watch in watches:
            watch.begin(stack)
            run = watch.before(run)
        stack.enter_context(_Mode(run))
        yield


class _Mode(TorchDispatchMode):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._ask = run

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # torch asks several times for each tensor
        # A DTensor runs first and comes back as the operations that it is made of.
        if DTensor in types:
            return NotImplemented
        # DTensor runs a new operation once on tensors without memory, to learn its result.
        others = torch._C._len_torch_dispatch_stack()  # rarely any; cheaper to ask than which
        run = _execute if others and active_fake_mode() is not None else self._ask
        return run(func, args, kwargs or {})


@contextmanager
def after(owner: Any, name: str, hook: Callable[..., None]) -> Iterator[None]:
    """Inside the block, call `hook(first, result, *args)` after a method of a class, or a function
    of a module that takes `first` before `args`."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        hook(self, result, *args, **kwargs)
        return result

    with replaced(owner, name, method):
        yield


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, replace a method of a class or a function of a module."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


_WATCHING = "/audit/", "/rehearse/", "/mesh/collectives"
"""Files of the project that only observe or forward calls."""


def project_line() -> str:
    """The innermost line of the project's code; a thread of autograd may have none."""
    frame = sys._getframe(1)
    while frame is not None:
        if file := _of_project(frame.f_code.co_filename):
            return f"at {file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "of the backward pass"


@cache
def _of_project(file: str) -> str:
    """The path of a file in the project; empty for files of others, and those that only watch."""
    there = file.startswith(ROOT) and not any(part in file for part in _WATCHING)
    return file[len(ROOT) + 1 :] if there else ""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or a result, including lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
