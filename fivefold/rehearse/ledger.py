"""Records a step: memory held, operations launched, host reads, and every message."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage

from fivefold.audit.calls import Call, call_of
from fivefold.audit.holdings import HOST, Accounting, Holdings, made_on_host
from fivefold.audit.launches import launches
from fivefold.audit.waits import READS
from fivefold.audit.watch import after, project_line, tensors_in
from fivefold.pipeline.ir import COMPUTE, Act
from fivefold.rehearse.script import ACTIVATIONS, MESSAGES, WORKING, Issued


@dataclass(frozen=True)
class ActRecord:
    """What one action of the pipeline did.

    Attributes:
        issued: operations of torch.distributed, in order.
        operations: operations that launched work.
        waits: times that the host read a number off the device.
        peak: bytes by category that were held above those before, when most was held.
        after: bytes by category that it left held, less those that it freed, without those of the
            tensors that entered and left.
    """

    issued: tuple[Issued, ...]
    operations: int
    waits: int
    peak: Mapping[str, int]
    after: Mapping[str, int]


class StepHoldings(Holdings):
    """Memory held in one step; what an operation makes is working memory until the action ends."""

    def __init__(self) -> None:
        super().__init__()
        self._unsettled: set[int] = set()

    def know(self, tensor: Tensor, kind: str = WORKING) -> None:
        """Count the storage of a new tensor as working memory, or as host memory."""
        if kind == HOST:
            super().know(tensor, HOST)
        elif tensor.device.type != "meta" and not self.knows(tensor):
            self._unsettled.add(tensor.untyped_storage()._cdata)
            super().know(tensor, WORKING)

    def settle(self) -> None:
        """Count what is still held at the end of an action as activations."""
        for key in list(self._unsettled):
            self._move(key, ACTIVATIONS)

    def beside(self, storages: Iterable[UntypedStorage | None]) -> dict[str, int]:
        """Bytes of each category now, without those of some storages; None: one that is gone."""
        found = self.held()
        for key in {storage._cdata for storage in storages if storage is not None}:
            size, kind, _ = self._alive[key]
            found[kind] -= size
        return found

    @contextmanager
    def own_peak(self) -> Iterator[None]:
        """Inside the block, the peak is that of the block."""
        before = self.peak, self.peak_at, self.at_peak
        self.peak, self.at_peak = self.total, self.held()
        yield
        if before[0] >= self.peak:
            self.peak, self.peak_at, self.at_peak = before

    def add(self, by_kind: Mapping[str, int], *, sign: int = 1) -> None:
        """Count bytes that no tensor holds."""
        for kind, size in by_kind.items():
            self._by_kind[kind] += sign * size
        self.total += sign * sum(by_kind.values())
        self._note_peak()

    def _move(self, key: int, kind: str) -> None:
        super()._move(key, kind)
        if kind not in (WORKING, MESSAGES):
            self._unsettled.discard(key)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._unsettled.discard(key)


class StepLedger(Accounting):
    """Watches the operations of one rank, on real tensors or on shapes.

    Attributes:
        holdings: what is held.
        issued: operations of torch.distributed, in order.
        operations: operations that launch work.
        waits: times that the host reads a number off the device within acts of the pipeline.
        acts: pipeline actions that compute.
        repeated: those of them that were counted instead of run.
        account: called when an act has computed, to tell `holdings` which tensors are what.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holdings: StepHoldings = StepHoldings()
        self.issued: list[Issued] = []
        self.operations = self.waits = self.acts = self.repeated = 0
        self.account: Callable[[], None] = lambda: None
        self._acting = False

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        super().begin(block)
        # No operation of tensors: of those with values, which stand for some on a device.
        block.enter_context(after(Tensor, "tolist", lambda *_: self.read_by_host()))

    def forget(self) -> None:
        """Forget operations issued and launched so far, but not what is held."""
        self.issued, self.operations, self.waits = [], 0, 0

    @contextmanager
    def act(self, act: Act) -> Iterator[None]:
        """Enter one pipeline action, as `pipeline.run.executor.Observer` requires."""
        self.holdings.settle()
        self.holdings.where, self._acting = str(act), True
        yield
        self._acting = False
        if act.kind in COMPUTE:
            self.acts += 1
            self.account()
        self.holdings.settle()
        self.holdings.where = ""

    def record(
        self, run: Callable[[], Sequence[Tensor]], entered: Sequence[weakref.ref[UntypedStorage]]
    ) -> ActRecord:
        """Run an action, and tell what it did.

        Args:
            run: runs it; returns the tensors that leave its stage.
            entered: storages that have entered its stage for it, or for an earlier action.
        """
        holdings, begun = self.holdings, (len(self.issued), self.operations, self.waits)
        holdings.settle()
        before, apart = holdings.held(), holdings.beside(one() for one in entered)
        with holdings.own_peak():
            left = [tensor.untyped_storage() for tensor in run()]
            peak = holdings.at_peak
        after = holdings.beside([*(one() for one in entered), *left])
        return ActRecord(
            tuple(self.issued[begun[0] :]),
            self.operations - begun[1],
            self.waits - begun[2],
            _grown(before, peak),
            _grown(apart, after),
        )

    def repeat(self, record: ActRecord, act: Act) -> None:
        """Count an action that does not run as one that did what was recorded."""
        self.issued += record.issued
        self.operations += record.operations
        self.waits += record.waits
        self.acts += 1
        self.repeated += 1
        self.holdings.settle()
        self.holdings.where = str(act)
        self.holdings.add(record.peak)
        self.holdings.add(record.peak, sign=-1)
        self.holdings.add(record.after)
        self.holdings.where = ""

    def read_by_host(self) -> None:
        """Count that the host reads a tensor's value."""
        self.waits += self._acting

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = call_of(func, args)
        if call is not None:
            self.issued.append(_issued(call))
            self.holdings.count_as(MESSAGES, (*call.gives, *call.gets), only=WORKING)
        elif func.name().partition(".")[0] in READS:
            self.read_by_host()
        result = super()._run(func, args, kwargs)
        self.operations += launches(func)
        empty = func.name().startswith("aten::empty.")
        for tensor in tensors_in(result):
            new = empty and not self.holdings.knows(tensor)
            self.holdings.know(tensor, HOST if new and made_on_host(project_line()) else WORKING)
        return result


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How many bytes more there are of each category."""
    sizes = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in {*before, *after}}
    return {kind: size for kind, size in sizes.items() if size}


def _issued(call: Call) -> Issued:
    tensor = (*call.gives, *call.gets)[0]
    size = call.size or sum(tensor.nbytes for tensor in call.gets)
    sent = call.sent if call.gives else 0.0
    name = str(tensor.dtype).removeprefix("torch.")
    return Issued(call.op, call.group.group_name, size, name, sent, call.peer, call.tag, call.parts)
