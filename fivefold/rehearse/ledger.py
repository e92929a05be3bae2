"""Keeps account of a step: what is held, launched and read, and every message."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fivefold.audit.calls import Call, bytes_of, call_of
from fivefold.audit.watch import Watch
from fivefold.pipeline.ir import COMPUTE, Act
from fivefold.rehearse.script import ACTIVATIONS, HOST, MESSAGES, WORKING, Issued

_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")


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
        self._unsettled: set[int] = set()

    def know(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if it is new, to the working set."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        gone = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = (0, WORKING, gone)
        self._unsettled.add(key)
        self._resize(key, storage.nbytes())

    def count_as(self, kind: str, tensors: Iterable[Tensor], *, only: str | None = None) -> None:
        """Move what tensors hold to a category; `only`: from that category."""
        for tensor in tensors:
            self.know(tensor)
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

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's new size."""
        if storage._cdata in self._alive:
            self._resize(storage._cdata, storage.nbytes())

    def settle(self) -> None:
        """What is still held when an act has ended is kept: activations."""
        for key in list(self._unsettled):
            self._move(key, ACTIVATIONS)

    def _resize(self, key: int, size: int) -> None:
        before, kind, reference = self._alive[key]
        self._alive[key] = (size, kind, reference)
        self.total += size - before
        self._by_kind[kind] += size - before
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, self.where
            self.at_peak = dict(self._by_kind)

    def _move(self, key: int, kind: str) -> None:
        size, before, reference = self._alive[key]
        self._alive[key] = (size, kind, reference)
        if kind not in (WORKING, MESSAGES):
            self._unsettled.discard(key)
        self._by_kind[before] -= size
        self._by_kind[kind] += size

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._alive[key]
        self._unsettled.discard(key)


class StepLedger(Watch):
    """Watches the operations of one rank, real or on shapes.

    Attributes:
        holdings: what is held.
        issued: operations of torch.distributed, in order.
        operations: operations that launch work.
        waits: times that the host reads a number off the device within acts of the pipeline.
        account: called when an act has computed, to tell `holdings` which tensors are what.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holdings = Holdings()
        self.issued: list[Issued] = []
        self.operations = self.waits = 0
        self.account: Callable[[], None] = lambda: None
        self._acting = False
        self._views: dict[Any, bool] = {}
        self._reads = _HostReads(self)
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "StepLedger":
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            self.holdings.resized(storage)
            return done

        # No dispatch mode sees this method, by which FSDP2 gives memory back.
        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._reads.__exit__(*exception)
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010

    def begin(self) -> None:
        """Forget what was issued and launched so far, but not what is held."""
        self.issued, self.operations, self.waits = [], 0, 0

    @contextmanager
    def act(self, act: Act) -> Iterator[None]:
        """The time of one act of the pipeline, as `pipeline.executor.Observer` wants it."""
        self.holdings.settle()
        self.holdings.where, self._acting = str(act), True
        yield
        self._acting = False
        if act.kind in COMPUTE:
            self.account()
        self.holdings.settle()
        self.holdings.where = ""

    def read_by_host(self) -> None:
        """The host reads a tensor's value."""
        self.waits += self._acting

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:  # asked of shapes again and again
            return args[0].fake_device
        call = call_of(func, args)
        if call is not None:
            self.issued.append(_issued(call))
            self.holdings.count_as(MESSAGES, (*call.gives, *call.gets), only=WORKING)
        elif func.name().partition(".")[0] in _WAITS:
            self.read_by_host()
        result = super()._run(func, args, kwargs)
        if func not in self._views:
            self._views[func] = _only_views(func)
        self.operations += not self._views[func]
        for tensor in _results(result):
            self.holdings.know(tensor)
        return result


class _HostReads(TorchFunctionMode):
    """Tells a ledger of the reads that are no operation of tensors."""

    def __init__(self, ledger: StepLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            self._ledger.read_by_host()
        return func(*args, **(kwargs or {}))


def _issued(call: Call) -> Issued:
    tensor = (*call.gives, *call.gets)[0]
    size = call.size or sum(map(bytes_of, call.gets))
    sent = call.sent if call.gives else 0.0
    name = str(tensor.dtype).removeprefix("torch.")
    return Issued(call.op, call.group.group_name, size, name, sent, call.peer, call.tag, call.parts)


def _only_views(func: Any) -> bool:
    """Whether all that an operation returns are views of its arguments."""
    returns = func._schema.returns
    aliases = [value.alias_info for value in returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _results(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for inner in result:
            yield from _results(inner)
