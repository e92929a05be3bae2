"""Weights in host memory or in files, which are copied to the device for each gather.

As in ZeRO-Infinity (Rajbhandari et al., SC 2021; DeepSpeed's `offload_param`): the device holds the
weights of those blocks only that compute or are about to. Which blocks are read next is known from
the program, so the host reads files ahead of it.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.config.memory import NUM_WEIGHT_BUFFERS
from fivefold.data_parallel.offloaded_shards import OffloadedShards
from fivefold.memory.host import CopyEvent, HostLink
from fivefold.memory.mapped import MappedTensors
from fivefold.mesh.slices import local_tensor


class OffloadedParameters:
    """The weights of blocks that are off the device, in the compute type.

    Args:
        blocks: blocks of this rank, each gathered at once.
        parameters: their parameters by name, of which only the shapes count.
        device: device of the stages.
        path: folder where weights lie in files; None: they are in host memory.

    Attributes:
        link: copies to the device, and counts their bytes.

    Raises:
        FivefoldError: the folder cannot hold them, or (while training) gave back other bytes.
    """

    def __init__(
        self,
        blocks: Sequence[OffloadedShards],
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        path: str | None,
    ) -> None:
        self.link = link = HostLink(device)
        folder = None if path is None else Path(path)
        shapes = {name: local_tensor(parameter).shape for name, parameter in parameters.items()}
        self._reading = self._waited = 0.0
        self._blocks = {block: _BlockWeights(block, shapes, link, folder) for block in blocks}
        self._of = {name: held for held in self._blocks.values() for name in held.weights}
        largest = max((held.nbytes for held in self._blocks.values()), default=0)
        self._buffers = [
            link.buffer(largest if folder is not None else 0, torch.uint8)
            for _ in range(NUM_WEIGHT_BUFFERS)
        ]
        self._events: list[CopyEvent] = [None] * NUM_WEIGHT_BUFFERS
        self._reader = ThreadPoolExecutor(1, "weights")
        self._order: list[OffloadedShards] = []
        self._at = self._turn = 0
        self._ahead = deque[tuple[int, Future[float]]]()  # buffer, and the seconds of its read
        for block in blocks:
            block.keep_at(partial(self._fetch, block), link.wait)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __getitem__(self, name: str) -> Tensor:
        """This rank's part of a weight, where it is stored."""
        return self._of[name].weights[name]

    def tensors(self) -> Iterator[Tensor]:
        """Everything in host memory: weights, or buffers for weights that come from files."""
        yield from self._buffers
        yield from (held.flat for held in self._blocks.values() if held.mapped is None)

    def disk_bytes(self) -> int:
        """Bytes of weights in files."""
        return sum(held.mapped.nbytes for held in self._blocks.values() if held.mapped)

    @property
    def moving_seconds(self) -> float:
        """Seconds of reading, and of copies made by the host itself."""
        return self._reading + self.link.seconds

    @property
    def waited_seconds(self) -> float:
        """Seconds of these during which the host waited."""
        return self._waited + self.link.seconds

    @torch.no_grad()
    def write(self, name: str, elements: slice, weight: Tensor) -> None:
        """Replace elements of this rank's part of a weight, cast to the compute type."""
        self._drop()
        self._of[name].write(name, elements, weight)

    def follow(self, order: Iterable[OffloadedShards]) -> None:
        """Set the order in which blocks will be gathered; reading ahead starts now."""
        self._drop()
        self._order, self._at = list(order), 0
        self._read_ahead()

    def _fetch(self, block: OffloadedShards, onto: Tensor) -> CopyEvent:
        """Start copying a block to the device."""
        held = self._blocks[block]
        if [block] != self._order[self._at : self._at + 1]:
            self._skip_to(block)
        self._at += 1
        if held.mapped is None:
            return self.link.to_device(held.flat, onto, short_lived=True)
        (number, seconds), began = self._ahead.popleft(), time.perf_counter()
        self._reading += seconds.result()
        self._waited += time.perf_counter() - began
        buffer = self._buffers[number][: held.nbytes].view(block.dtype)
        event = self._events[number] = self.link.to_device(buffer, onto, short_lived=True)
        self._read_ahead()
        return event

    def _skip_to(self, block: OffloadedShards) -> None:
        """Continue from a block that was not expected next."""
        self._drop()
        if block in self._order[self._at :]:
            self._at = self._order.index(block, self._at)
        else:
            self._order.insert(self._at, block)
        self._read_ahead()

    def _read_ahead(self) -> None:
        for block in self._order[self._at + len(self._ahead) : self._at + NUM_WEIGHT_BUFFERS]:
            if (held := self._blocks[block]).mapped is not None:
                buffer, self._turn = self._turn, (self._turn + 1) % NUM_WEIGHT_BUFFERS
                seconds = self._reader.submit(self._read, held, buffer, self._events[buffer])
                self._ahead.append((buffer, seconds))

    def _read(self, held: "_BlockWeights", buffer: int, event: CopyEvent) -> float:
        """Read a block into a free buffer; returns the seconds that it took."""
        self.link.synchronize(event)
        began = time.perf_counter()
        held.read(self._buffers[buffer])
        return time.perf_counter() - began

    def _drop(self) -> None:
        """Discard what was read ahead."""
        for _, seconds in self._ahead:
            seconds.cancel()
        self._ahead.clear()


class _BlockWeights:
    """The weights of a block, contiguous in host memory or in a file.

    Attributes:
        flat: all of them, with the padding of short shards.
        weights: this rank's parts, by name.
        mapped: the file; None: they are in memory.
    """

    def __init__(
        self,
        block: OffloadedShards,
        shapes: Mapping[str, torch.Size],
        link: HostLink,
        folder: Path | None,
    ) -> None:
        self._name, numel = f"the block of {block.names[0]}", sum(block.sizes)
        self._whole = self._name, slice(0, numel)
        self.mapped: MappedTensors | None = None
        if folder is None:
            self.flat = link.buffer(numel, block.dtype).zero_()
        else:
            like = torch.empty(numel, dtype=block.dtype, device="meta")
            self.mapped = MappedTensors({self._name: like}, folder, "param_offload_path", "weights")
            self.flat = self.mapped.tensors[self._name]
        parts = zip(block.names, self.flat.split(block.sizes), strict=True)
        self.weights = {n: part[: shapes[n].numel()].view(shapes[n]) for n, part in parts}
        self._unwritten = self._elements = sum(w.numel() for w in self.weights.values())
        if self.mapped is not None and not self._elements:  # all of it is padding
            self.mapped.seal([self._whole])

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.flat.nbytes

    def write(self, name: str, elements: slice, weight: Tensor) -> None:
        """Replace elements of a weight, each once per update; when all are replaced, the file is
        sealed."""
        self.weights[name].view(-1)[elements].copy_(weight.view(-1))
        self._unwritten -= weight.numel()
        if not self._unwritten:
            self._unwritten = self._elements
            if self.mapped is not None:
                self.mapped.seal([self._whole])

    def read(self, buffer: Tensor) -> None:
        """Read the file into a buffer of bytes."""
        assert self.mapped is not None
        self.mapped.read(self._whole, buffer[: self.nbytes], self._name)
