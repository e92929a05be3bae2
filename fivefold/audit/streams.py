"""Tracks the streams of a GPU, and finds accesses to memory that no wait orders."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.audit.calls import is_call
from fivefold.audit.races import HOST, Mark, Races, Span
from fivefold.audit.waits import awaited
from fivefold.audit.watch import Watch, after, project_line, tensors_in
from fivefold.errors import FivefoldError, Mistake
from fivefold.mesh.arguments import PLACES

SHOWN = 8
"""Number of races that are reported in full."""


class StreamWatch(Watch):
    """Finds races between streams while it is entered; works on a GPU of any speed, or on a stub.

    What an operation reads and writes is what its schema says, so kernels that are launched past
    torch's dispatcher are not seen. Messages have a stream for each group, as NCCL has. Memory that
    went back to the allocator too early shows where it is used again. Waits are seen if they are
    Python's, or a work's.

    Attributes:
        races: what has been found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races = Races()
        self._lock = RLock()
        self._works: dict[int, tuple[dist.Work, Mark]] = {}
        self._known: dict[int, set[str]] = {}
        self._messages: set[str] = set()

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        hooks: list[tuple[type, str, Callable[..., None]]] = [
            (torch.cuda.Event, "record", self._record),
            (torch.cuda.Event, "wait", self._wait),
            (torch.cuda.Event, "synchronize", self._host_waits),
            (torch.cuda.Stream, "synchronize", self._host_waits_for_stream),
            (dist.ProcessGroup, "_end_coalescing", self._end_batch),
            *((kind, "wait", self._arrive) for kind in _kinds_of_work()),
        ]
        for owner, name, hook in hooks:
            block.enter_context(after(owner, name, hook))

    def raise_if_any(self) -> None:
        """Raise an error if races were found.

        Raises:
            FivefoldError: there are races.
        """
        found = sorted(self.races.found.items(), key=lambda item: -item[1])
        if found:
            shown = [f"{times} x {race}" for race, times in found[:SHOWN]]
            shown += [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
            raise FivefoldError(Mistake(f"{len(found)} races between streams", tuple(shown)))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if is_call(func) and func.name().partition(".")[0] in PLACES:
            return self._call(func, args, kwargs)
        result = super()._run(func, args, kwargs)
        if func is torch.ops.aten.record_stream.default:
            with self._lock:
                tensor, stream = args
                self._known.setdefault(_key(tensor), set()).add(_name(stream))
        elif not _is_view(func):
            self._operation(func, args, kwargs, result)
        return result

    def _operation(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        written = _written(func)
        reads: list[Tensor] = []
        writes = [] if _only_allocates(func) else list(tensors_in(result))
        for place, value in (*enumerate(args), *kwargs.items()):
            (writes if place in written else reads).extend(tensors_in(value))
        touched = [*reads, *writes]
        on_gpu = any(x.is_cuda for x in touched)
        if not on_gpu and not any(x.is_pinned() for x in touched):
            return
        stream = _name(torch.cuda.current_stream()) if on_gpu else HOST
        what = f"{func.name().partition('.')[0]} {project_line()}"
        with self._lock:
            for x in touched:
                self._await_end(x)
            self.races.access(stream, what, _spans(reads), _spans(writes))
            if on_gpu and awaited(func, args, kwargs, result):
                self.races.wait(HOST, self.races.mark(stream))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operation of torch.distributed, which starts after the current stream's earlier
        work."""
        places = PLACES[func.name().partition(".")[0]]
        gives, gets = (
            [] if at is None else [x for x in tensors_in(args[at]) if x.is_cuda]
            for at in (places.gives, places.gets)
        )
        result = super()._run(func, args, kwargs)
        if not gives and not gets:
            return result
        group = dist.ProcessGroup.unbox(args[places.group])
        stream = here = _name(torch.cuda.current_stream())
        if _is_async(func, args):
            stream = _messages_of(group)
        what = f"{func.name().partition('.')[0]} {project_line()}"
        with self._lock:
            for x in (*gives, *gets):
                self._await_end(x)
            self.races.wait(stream, self.races.mark(here))
            self.races.access(stream, what, _spans(gives), _spans(gets))
            if stream != here:
                self._messages.add(stream)
                work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
                self._works[id(work)] = work, self.races.mark(stream)
        return result

    def _await_end(self, tensor: Tensor) -> None:
        """Get notified when the memory of a new tensor returns to its allocator."""
        storage = tensor.untyped_storage()
        key, start, size = _key(tensor), storage.data_ptr(), storage.nbytes()
        if key in self._known or not size:
            return
        self._known[key] = set()
        weakref.finalize(storage, self._free, key, Span(start, start + size), tensor.is_cuda)

    def _free(self, key: int, span: Span, on_gpu: bool) -> None:
        with self._lock:
            known = self._known.pop(key, set())
            # The allocator of pinned memory knows of every copy, and works keep their tensors until
            # a stream or the host has waited for the messages.
            self.races.free(span, known | self._messages if on_gpu else None)

    def _record(self, event: Any, result: Any, stream: Any = None) -> None:
        with self._lock:
            mark = self.races.mark(_name(stream or torch.cuda.current_stream()))
            # Kept on the event, since torch destroys CUDA events without notifying weak references.
            event.reached = self, mark

    def _wait(self, event: Any, result: Any, stream: Any = None) -> None:
        with self._lock:
            name = _name(stream or torch.cuda.current_stream())
            self.races.wait(name, self._mark_of(event))

    def _host_waits(self, event: Any, result: Any) -> None:
        with self._lock:
            self.races.wait(HOST, self._mark_of(event))

    def _mark_of(self, event: Any) -> Mark:
        """The place that an event has recorded since this watch began."""
        watch, mark = getattr(event, "reached", (None, {}))
        return mark if watch is self else {}

    def _host_waits_for_stream(self, stream: Any, result: Any) -> None:
        with self._lock:
            self.races.wait(HOST, self.races.mark(_name(stream)))

    def _arrive(self, work: Any, result: Any, *timeout: Any) -> None:
        with self._lock:
            _, mark = self._works.pop(id(work), (None, {}))
            self.races.wait(_name(torch.cuda.current_stream()), mark)

    def _end_batch(self, group: Any, work: Any, *device: Any) -> None:
        with self._lock:
            self._works[id(work)] = work, self.races.mark(_messages_of(group))


def _kinds_of_work() -> list[type]:
    """torch's class of works, and its subclasses with their own wait."""
    return [dist.Work, *(kind for kind in dist.Work.__subclasses__() if "wait" in vars(kind))]


def _name(stream: Any) -> str:
    return f"stream {stream.stream_id}" if stream.stream_id else "the default stream"


def _messages_of(group: Any) -> str:
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    return f"the messages of ranks {ranks} (group {group.group_name})"


def _is_async(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation runs beside the current stream; other operations of NCCL run in it."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("async_op") if "async_op" in names else len(names)
    return bool(args[place]) if place < len(args) else True


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _spans(tensors: list[Tensor]) -> list[Span]:
    """The memory of tensors, from the first element to the last."""
    found = []
    for x in tensors:
        if x.numel() and x.untyped_storage().nbytes():
            steps = sum((n - 1) * by for n, by in zip(x.shape, x.stride(), strict=True))
            found.append(Span(x.data_ptr(), x.data_ptr() + (steps + 1) * x.element_size()))
    return found


@lru_cache(maxsize=4096)
def _written(func: Any) -> frozenset[int | str]:
    """Places and names of the arguments that an operation writes."""
    places: set[int | str] = set()
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            places |= {place, argument.name}
    return frozenset(places)


@lru_cache(maxsize=4096)
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@lru_cache(maxsize=4096)
def _only_allocates(func: Any) -> bool:
    return "empty" in func.name()
