"""A model of PyTorch's caching allocator for CUDA memory, which predicts the reserved memory.

Algorithm and constants: `CUDACachingAllocator` of PyTorch 2.x. Blocks are cut out of segments, and
a freed one is joined with free neighbours; a request takes the smallest free block of its stream
that is large enough, else the device is asked for a new segment. With expandable segments a stream
has one segment, which grows at its end. Only when the device has no more are segments given back
that hold nothing.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

_MIB = 2**20
_GRAIN = 512  # every block is a multiple of it
_SMALL = _MIB  # larger requests have segments of their own kind
_SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE = 2 * _MIB, 20 * _MIB, 10 * _MIB


@dataclass(eq=False)
class _Block:
    """A piece of a segment; the pieces of a segment are linked in order of their addresses."""

    address: int
    size: int
    pool: tuple[str, bool]
    free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class Allocator:
    """The state of the allocator of one device.

    Attributes:
        expandable: whether segments are expandable (`expandable_segments:True`).
        capacity: bytes that the device has.
        reserved: bytes taken from the device.
        most_reserved: most bytes reserved since the last `reset`.
        allocated: bytes in use by tensors.
        most_allocated: most bytes ever in use.
        overflowed: whether tensors ever needed more than the device has.
    """

    expandable: bool = False
    capacity: float = inf
    reserved: int = 0
    most_reserved: int = 0
    allocated: int = 0
    most_allocated: int = 0
    overflowed: bool = False
    _used: dict[Hashable, _Block] = field(default_factory=dict)
    _free: dict[tuple[str, bool], list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _at: dict[int, _Block] = field(default_factory=dict)
    _tails: dict[tuple[str, bool], _Block] = field(default_factory=dict)
    _segments: int = 0

    def allocate(self, name: Hashable, size: float, stream: str = "compute") -> None:
        """Allocate a tensor on a stream; its memory can only be reused on that stream."""
        assert name not in self._used, f"{name} is there already"
        wanted = max(-(-int(size) // _GRAIN), 1) * _GRAIN
        pool = (stream, wanted <= _SMALL)
        fitting = self._free[pool]
        at = bisect_left(fitting, (wanted, -1))
        block = self._take(fitting[at][1]) if at < len(fitting) else self._extend(pool, wanted)
        spare = block.size - wanted
        if spare and (self.expandable or pool[1] or spare > _SMALL):
            self._split(block, wanted)
        self._used[name] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, name: Hashable) -> None:
        """Free a tensor; its block is merged with free neighbours."""
        block = self._used.pop(name)
        self.allocated -= block.size
        if block.after is not None and block.after.free:
            self._join(block, self._take(block.after.address))
        if block.before is not None and block.before.free:
            earlier = self._take(block.before.address)
            self._join(earlier, block)
            block = earlier
        self._offer(block)

    def reset(self) -> None:
        """Reset the peak of reserved memory, as `reset_peak_memory_stats` does."""
        self.most_reserved = self.reserved

    def _extend(self, pool: tuple[str, bool], wanted: int) -> _Block:
        """Take memory from the device: a new segment, or more of an expandable one."""
        unit = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        tail = self._tails.get(pool) if self.expandable else None
        if not self.expandable and wanted >= _LARGE:
            unit = _SMALL_SEGMENT  # the size itself, in whole units
        spare = tail.size if tail is not None and tail.free else 0
        size = -(-(wanted - spare) // unit) * unit
        if self.reserved + size > self.capacity:
            self._give_back()
            held = self.allocated if self.expandable else self.reserved
            self.overflowed |= held + size > self.capacity
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        if spare and tail is not None:
            self._take(tail.address)
            tail.size += size
            return tail
        if tail is None:
            self._segments += 1
            block = _Block(self._segments << 48, size, pool)
        else:
            block = _Block(tail.address + tail.size, size, pool, before=tail)
            tail.after = block
        self._tails[pool] = self._at[block.address] = block
        return block

    def _give_back(self) -> None:
        """Return segments without a tensor to the device; of expandable ones, such pages."""
        if self.expandable:
            self.reserved = self.allocated
            return
        for fitting in self._free.values():
            for size, address in list(fitting):
                block = self._at[address]
                if block.before is block.after is None:
                    self._take(address)
                    del self._at[address]
                    self.reserved -= size

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(
            block.address + size, block.size - size, block.pool, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._at[rest.address] = rest
        if self._tails.get(block.pool) is block:
            self._tails[block.pool] = rest
        self._offer(rest)

    def _join(self, block: _Block, later: _Block) -> None:
        block.size += later.size
        block.after = later.after
        if later.after is not None:
            later.after.before = block
        del self._at[later.address]
        if self._tails.get(block.pool) is later:
            self._tails[block.pool] = block

    def _offer(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address))

    def _take(self, address: int) -> _Block:
        block = self._at[address]
        block.free = False
        fitting = self._free[block.pool]
        del fitting[bisect_left(fitting, (block.size, address))]
        return block
