"""Observes every tensor operation of this process."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = str(Path(__file__).resolve().parents[1])


class Watch(TorchDispatchMode):
    """Observes operations on plain tensors inside its block, including those of a backward."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A DTensor runs first and comes back as the operations that it is made of.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        # Of operations that are new to it, DTensor learns on tensors without memory what they give.
        if not self._observes(func) or active_fake_mode() is not None:
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})

    def _observes(self, func: Any) -> bool:
        """Whether the operation concerns this observer; asked of every one, so it must be quick."""
        return True

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation; subclasses observe it before or after."""
        return func(*args, **kwargs)


@contextmanager
def after(owner: Any, name: str, hook: Callable[..., None]) -> Iterator[None]:
    """Call `hook(object, result, *args)` after a method of a class, inside the block."""
    original, own = getattr(owner, name), name in vars(owner)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        hook(self, result, *args, **kwargs)
        return result

    setattr(owner, name, method)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def project_line() -> str:
    """The innermost line of the project; in a thread of autograd there may be none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and "/audit/" not in file and "/mesh/collectives" not in file:
            return f"at {file[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "of the backward pass"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result, in lists, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
