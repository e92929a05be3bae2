"""A back end of torch.distributed for ranks that share a GPU, which NCCL does not allow.

Tensors go through pinned host memory and gloo: copied out on a stream of their group, sent by
threads of the host, copied in on that stream. For the program it is as with NCCL: a call returns at
once, reads after the work that its stream holds so far, and writes at any time until a stream has
waited for it, so that a missing wait has the same effect. Only `wait()` differs: it holds the host,
too, until the other ranks have come.

The back end lies below torch's dispatcher, where NCCL's does: it replaces the kernels that the
operations of torch.distributed have for CUDA tensors.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fivefold.mesh.arguments import PLACES

Pause = Callable[[], None]

SHARED_GPU = "shared_gpu"
"""Name of the back end."""

LOCAL = "127.0.0.1"
"""Where the ranks are that share a GPU."""
IN_FLIGHT = 256
"""Number of operations of a rank in progress at once; each has a thread that waits for it."""


def share_gpu(device: torch.device, pause: Pause | None) -> str:
    """Route tensors on `device` through the host, and return the back end for the world.

    Args:
        device: GPU of this process.
        pause: called before each copy, in its stream, which it may hold up for a test.
    """
    if not hasattr(dist.Backend, SHARED_GPU.upper()):
        relay = Relay(device, pause)
        relay.take_over()
        dist.Backend.register_backend(
            SHARED_GPU, relay.connect, extended_api=True, devices=["cuda"]
        )
    return f"cpu:gloo,cuda:{SHARED_GPU}"


class Relay:
    """Runs operations on tensors of one device as operations on copies in host memory.

    Copies out end in the order of the calls, which is that in which gloo pairs the calls of ranks.
    Then the collectives of a group run in turn, and everything else goes its own way.

    Args:
        device: device of the tensors; on a CPU there are no streams, and copies are done when asked
            for.
        pause: called before each copy, in its stream.
    """

    def __init__(self, device: torch.device, pause: Pause | None) -> None:
        self._device, self._pause = device, pause or (lambda: None)
        self._links: dict[str, _Link] = {}
        self._senders, self._receivers = (
            ThreadPoolExecutor(threads, SHARED_GPU, self._enter_thread)
            for threads in (1, IN_FLIGHT)
        )

    def take_over(self) -> None:
        """Replace the CUDA kernels of torch.distributed's operations in this process."""
        self._library = torch.library.Library("c10d", "IMPL")  # unregisters its kernels when freed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels being replaced
            for name in PLACES:
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                    kernel = RelayedKernel(self, name)
                    self._library.impl(kernel.short, kernel, "CUDA", allow_override=True)

    def connect(self, at: Any, options: Any) -> Any:
        """Create a group's back end; `at` identifies its ranks (torch's extended API)."""
        gloo_class: Any = dist.ProcessGroupGloo
        settings = gloo_class._Options()
        settings._timeout = at.timeout
        settings._threads = 1  # a group's collectives run in turn, as NCCL's
        settings._devices = [gloo_class.create_device(hostname=LOCAL)]
        gloo = gloo_class(at.store, at.group_rank, at.group_size, settings)
        # gloo pairs collectives by their order on each rank. CPU tensors of the program have a gloo
        # of their own, since they do not queue with those that come from the GPU.
        group = dist.ProcessGroup(at.store, at.group_rank, at.group_size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, gloo)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._links[at.group_id] = _Link(group, stream)
        return gloo

    def start(self, name: str, *args: Any) -> dist.Work:
        """Start an operation of torch.distributed, "c10d::allreduce_" for instance.

        The result's `wait()` makes the current stream wait for what was received, and raises what
        gloo raised. It is completed only when it has been waited for, as a send of gloo.
        """
        places = PLACES[name]
        link = self._links[dist.ProcessGroup.unbox(args[places.group]).group_name]
        relayed = _Relayed(name, link, Future(devices=link.devices))
        with torch.no_grad(), link.after_caller():
            self._pause()
            hosts = list(args)
            hosts[places.group] = link.group.boxed()
            for place in {0, places.gives or 0, places.gets or 0}:  # 0 is a barrier's unused tensor
                hosts[place] = _mapped(args[place], link.host_like)
            if places.gives is not None:
                for tensor, host in _pairs(args[places.gives], hosts[places.gives]):
                    host.view(tensor.dtype).copy_(tensor.data, non_blocking=True)
            relayed.hosts = hosts
            relayed.read = link.mark()
        if places.gives is not None:
            relayed.kept = args[places.gives]
        if places.gets is not None:
            relayed.arriving = list(_pairs(args[places.gets], hosts[places.gets]))
        self._senders.submit(self._send, relayed)
        return _work(lambda _: relayed.arrived.wait() is not None)

    def _send(self, relayed: "_Relayed") -> None:
        try:
            relayed.link.let_host_wait(relayed.read)
            relayed.kept = None
            work, unpack = _on_hosts(relayed.name, relayed.hosts)
        except Exception as error:
            relayed.arrived.set_exception(error)
            return
        self._receivers.submit(self._receive, relayed, work, unpack)

    def _receive(self, relayed: "_Relayed", work: dist.Work, unpack: Callable[[], None]) -> None:
        link = relayed.link
        try:
            work.wait()
            unpack()
            with torch.no_grad(), link.entered():
                self._pause()
                for tensor, host in relayed.arriving:
                    # Not a change that autograd should know of: none comes from NCCL either.
                    tensor.data.copy_(host.view(tensor.dtype), non_blocking=True)
                written = link.mark()
                relayed.arrived.set_result([tensor for tensor, _ in relayed.arriving])
        except Exception as error:
            relayed.arrived.set_exception(error)
            return
        link.let_host_wait(written)  # keeps the relayed tensors alive until here

    def _enter_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)


class RelayedKernel:
    """The kernel of one operation for CUDA tensors."""

    def __init__(self, relay: Relay, name: str) -> None:
        self._relay, self._name = relay, name
        self.short = name.removeprefix("c10d::")
        returns = getattr(torch.ops.c10d, self.short).default._schema.returns
        self._gives_tensors = len(returns) == 2
        self.__name__ = f"{SHARED_GPU}_{self.short}"

    def __call__(self, *args: Any) -> Any:
        """What torch's own kernel would return."""
        work = self._relay.start(self._name, *args).boxed()
        return (args[0], work) if self._gives_tensors else work


@dataclass(frozen=True)
class _Link:
    """The connection of one group between device and hosts.

    Attributes:
        group: group of the same ranks, for copies in host memory.
        stream: stream of the copies; None on a CPU.
    """

    group: dist.ProcessGroup
    stream: torch.cuda.Stream | None

    @property
    def devices(self) -> list[int | str | torch.device]:
        """Devices on whose streams `wait()` waits."""
        return [] if self.stream is None else [self.stream.device]

    def entered(self) -> AbstractContextManager[Any]:
        """Copies inside run on the group's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def after_caller(self) -> AbstractContextManager[Any]:
        """Copies inside run there after all work that the caller's stream holds so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return self.entered()

    def host_like(self, tensor: Tensor) -> Tensor:
        """Host memory for a copy of a tensor; pinned for asynchronous copies.

        gloo knows no floats of 8 bits: they travel as bytes, which nobody can add up.
        """
        narrow = tensor.dtype.is_floating_point and tensor.itemsize == 1
        dtype = torch.uint8 if narrow else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=self.stream is not None)

    def mark(self) -> torch.cuda.Event | None:
        """The current place of the group's stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(blocking=True)  # waiting threads free their core for others
        event.record(self.stream)
        return event

    def let_host_wait(self, mark: torch.cuda.Event | None) -> None:
        """Wait until the stream has passed a mark."""
        if mark is not None:
            mark.synchronize()


@dataclass
class _Relayed:
    """An operation in progress.

    Attributes:
        name: name of the operation.
        link: way of its group.
        arrived: future that is done when the copies to the device have been launched.
        hosts: arguments of the operation on copies in host memory.
        read: mark behind the copies from the device.
        kept: tensors that are being copied from the device.
        arriving: tensors to fill, each with its copy in host memory.
    """

    name: str
    link: _Link
    arrived: Future[Any]
    hosts: list[Any] = field(default_factory=list)
    read: torch.cuda.Event | None = None
    kept: Any = None
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _work(wait: Callable[[Any], bool]) -> dist.Work:
    """A work object whose `wait` is the given function; it is torch's Python class of works that
    can raise."""
    from torch._C._distributed_c10d import PythonCallbackWork

    work: dist.Work = PythonCallbackWork(wait)
    return work


def _on_hosts(name: str, args: list[Any]) -> tuple[dist.Work, Callable[[], None]]:
    """Start an operation on host memory; the second result is called when it is done."""
    if name == "c10d::alltoall_":  # not every gloo supports it for lists
        outputs, inputs, group = args[:3]
        sent = torch.cat([_bytes(tensor) for tensor in inputs])
        rows = [_bytes(tensor) for tensor in outputs]
        got = torch.cat(rows)
        sizes = [row.numel() for row in rows], [_bytes(tensor).numel() for tensor in inputs]
        work = torch.ops.c10d.alltoall_base_(got, sent, group, *sizes)

        def unpack() -> None:
            for row, part in zip(rows, got.split(sizes[0]), strict=True):
                row.copy_(part)

        return dist.Work.unbox(work), unpack
    result = getattr(torch.ops.c10d, name.removeprefix("c10d::"))(*args)
    return dist.Work.unbox(result[-1] if isinstance(result, tuple) else result), lambda: None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _mapped(tensors: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or tensors in nested lists, each replaced by what `make` gives for it."""
    if isinstance(tensors, Tensor):
        return make(tensors)
    return [_mapped(inner, make) for inner in tensors]


def _pairs(tensors: Any, others: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of the tensors in the same places of two nested lists."""
    if isinstance(tensors, Tensor):
        yield tensors, others
        return
    for inner, other in zip(tensors, others, strict=True):
        yield from _pairs(inner, other)
