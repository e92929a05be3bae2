"""Counts the memory that tensors hold, storage by storage."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fivefold.audit.watch import Watch, after, project_line, tensors_in
from fivefold.errors import Mistake, TrainingError
from fivefold.units import human_bytes

HOST = "host"
"""Category of tensors that stand for host memory; their bytes are not counted."""
SHOWN = 8


def made_on_host(line: str) -> bool:
    """Whether tensors that a line of the project creates stand for host memory."""
    return line.startswith("at memory/host.py")


class Holdings:
    """Bytes of the storages that are alive, by category.

    Attributes:
        total: bytes held now.
        peak: most bytes held at once.
        at_peak: bytes of each category at that time.
        peak_at: `where` at that time.
        where: what is running.
    """

    def __init__(self) -> None:
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_at = self.where = ""
        self._by_kind: defaultdict[str, int] = defaultdict(int)
        self._alive: dict[int, tuple[int, str, weakref.ref[Any]]] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor is counted."""
        return tensor.untyped_storage()._cdata in self._alive

    def know(self, tensor: Tensor, kind: str) -> None:
        """Count the storage of a tensor to a category, if it is new."""
        if tensor.device.type == "meta" or self.knows(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        gone = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = (0, kind, gone)
        self._resize(key, storage.nbytes() if kind != HOST else 0)

    def count_as(self, kind: str, tensors: Iterable[Tensor], *, only: str | None = None) -> None:
        """Move what tensors hold to a category; `only`: from that category."""
        for tensor in tensors:
            self.know(tensor, kind)
            key = tensor.untyped_storage()._cdata
            if key in self._alive and only in (None, self._alive[key][1]):
                self._move(key, kind)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting tensors in host memory, and forget the peak that they were part of."""
        self.count_as(HOST, tensors)
        for key, (_, kind, _) in [*self._alive.items()]:
            if kind == HOST:
                self._resize(key, 0)
        self.peak, self.at_peak = self.total, dict(self._by_kind)

    def held(self) -> dict[str, int]:
        """Bytes of each category now."""
        return dict(self._by_kind)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record a storage's new size."""
        if storage._cdata in self._alive:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        before, kind, reference = self._alive[key]
        self._alive[key] = (size, kind, reference)
        self.total += size - before
        self._by_kind[kind] += size - before
        self._note_peak()

    def _note_peak(self) -> None:
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, self.where
            self.at_peak = dict(self._by_kind)

    def _move(self, key: int, kind: str) -> None:
        size, before, reference = self._alive[key]
        self._alive[key] = (size, kind, reference)
        self._by_kind[before] -= size
        self._by_kind[kind] += size

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._alive[key]


class Accounting(Watch):
    """Counts all memory that operations allocate inside its block, and that storages free.

    Attributes:
        holdings: what is held.
    """

    holdings: Holdings

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        # No dispatch mode sees this method, by which FSDP2 gives memory back.
        hook = after(torch.UntypedStorage, "resize_", lambda it, *_: self.holdings.resized(it))
        block.enter_context(hook)


class DeviceLimit(Accounting):
    """Enforces a limit on the memory of tensors, on a CPU.

    Tensors that stand for host memory do not count: those that it is told of, and what
    `memory/host.py` makes.

    Args:
        limit: most bytes that tensors may hold.
        there: tensors that are on the device from the start, by what they are.
        host: tensors that stand for host memory.

    Raises:
        TrainingError: there is more from the start, or (inside its block) an operation makes more;
            with the lines that made most of it.
    """

    def __init__(
        self, limit: float, there: Mapping[str, Iterable[Tensor]], host: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self.limit, self.holdings = limit, Holdings()
        for kind, tensors in there.items():
            self.holdings.count_as(kind, tensors)
        self.holdings.leave_out(host)
        self._check()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        for tensor in tensors_in(result):
            if not self.holdings.knows(tensor):
                line = project_line()
                made = f"{func.name().partition('.')[0]} {line}"
                self.holdings.know(tensor, HOST if made_on_host(line) else made)
        self._check()
        return result

    def _check(self) -> None:
        if self.holdings.total > self.limit:
            taken, limit = human_bytes(self.holdings.total), human_bytes(self.limit)
            what = f"tensors on the device take {taken}, more than --device-memory-limit {limit}"
            raise TrainingError(Mistake(what, tuple(self._largest())))

    def _largest(self) -> Iterator[str]:
        most = sorted(self.holdings.held().items(), key=lambda item: -item[1])
        yield from (f"{human_bytes(size):>9}  {kind}" for kind, size in most[:SHOWN] if size > 0)
        if rest := sum(size for _, size in most[SHOWN:]):
            yield f"{human_bytes(rest):>9}  {len(most) - SHOWN} other lines"
