"""Keeps account of a step: what is held, launched and read, and every message."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fivefold.audit.calls import Call, bytes_of, call_of
from fivefold.audit.holdings import Accounting, Holdings
from fivefold.pipeline.ir import COMPUTE, Act
from fivefold.rehearse.script import ACTIVATIONS, MESSAGES, WORKING, Issued

_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")


class StepHoldings(Holdings):
    """Holdings of one step: what an operation makes is its working set, until the act has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._unsettled: set[int] = set()

    def know(self, tensor: Tensor, kind: str = WORKING) -> None:
        """Count the storage of a tensor, if it is new, to the working set."""
        if tensor.device.type != "meta" and not self.knows(tensor):
            self._unsettled.add(tensor.untyped_storage()._cdata)
            super().know(tensor, WORKING)

    def settle(self) -> None:
        """What is still held when an act has ended is kept: activations."""
        for key in list(self._unsettled):
            self._move(key, ACTIVATIONS)

    def _move(self, key: int, kind: str) -> None:
        super()._move(key, kind)
        if kind not in (WORKING, MESSAGES):
            self._unsettled.discard(key)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._unsettled.discard(key)


class StepLedger(Accounting):
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
        self.holdings: StepHoldings = StepHoldings()
        self.issued: list[Issued] = []
        self.operations = self.waits = 0
        self.account: Callable[[], None] = lambda: None
        self._acting = False
        self._views: dict[Any, bool] = {}
        self._reads = _HostReads(self)

    def begin(self) -> None:
        """See `Watch`."""
        super().begin()
        self._reads.__enter__()

    def end(self) -> None:
        """See `Watch`."""
        self._reads.__exit__(None, None, None)
        super().end()

    def forget(self) -> None:
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
