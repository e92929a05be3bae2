"""Observes every tensor operation of this process."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


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
