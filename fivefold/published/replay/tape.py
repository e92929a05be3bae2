"""Replays forward and backward of modules: the tensors that autograd creates, keeps and frees."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fivefold.published.replay.allocator import Allocator


@dataclass(frozen=True)
class Op:
    """An operation of a module; sizes are in bytes, and names are those of the module's tensors.

    Attributes:
        out: name of its result.
        size: size of its result.
        inputs: names of the tensors that it reads and that get a gradient.
        saves: names of the tensors that its backward reads.
        weight: size of the gradient of its weight.
        buffer: size of the buffer of its collective, allocated briefly in forward and backward.
        scratch: sizes of tensors created and freed in the forward.
        backward_scratch: sizes of tensors created and freed in the backward.
        outlives: names of tensors that a variable holds until this operation has run.
        passes: whether the gradient of the result is that of every input, as in a sum.
        recycles: whether the saved tensor becomes the gradient of the input in place.
        is_matmul: whether it multiplies matrices.
    """

    out: str
    size: float
    inputs: tuple[str, ...]
    saves: tuple[str, ...] = ()
    weight: float = 0.0
    buffer: float = 0.0
    scratch: tuple[float, ...] = ()
    backward_scratch: tuple[float, ...] = ()
    outlives: tuple[str, ...] = ()
    passes: bool = False
    recycles: bool = False
    is_matmul: bool = False


def saved_by(ops: Iterable[Op]) -> frozenset[str]:
    """Names of all tensors that a backward reads."""
    return frozenset(name for op in ops for name in op.saves)


def again(ops: Sequence[Op], kept: frozenset[str]) -> list[Op]:
    """The operations that a backward must recompute if only `kept` was kept, in order."""
    wanted = {*saved_by(ops)} - kept
    found = []
    for op in reversed(ops):
        if op.out in wanted:
            found.append(op)
            wanted |= set(op.inputs) - kept
    return found[::-1]


@dataclass
class Tape:
    """Runs modules on an allocator.

    A module's tensors are named (module, name); `ends` gives the names of its first input and its
    result in neighbouring modules.

    Attributes:
        allocator: allocator of the device.
        lead: most collectives by which the host is ahead of the device; the host frees their
            buffers only when it learns that the device is done with them.
    """

    allocator: Allocator
    lead: int
    _pending: deque[Hashable] = field(default_factory=deque)
    _count: int = 0
    _owners: Counter[Hashable] = field(default_factory=Counter)
    _gradients: dict[Hashable, Hashable] = field(default_factory=dict)

    def forward(
        self,
        module: Hashable,
        ops: Sequence[Op],
        kept: frozenset[str],
        ends: Mapping[str, Hashable],
    ) -> None:
        """Run operations; tensors that no later one reads are freed unless they are kept."""
        result = ops[-1].out if ops else None
        last = {name: op for op in ops for name in (*op.inputs, *op.outlives, op.out)}
        for op in ops:
            self._make(module, op, ends)
            for name in dict.fromkeys((*op.inputs, *op.outlives, op.out)):
                if last[name] is op and name not in kept and name != result:
                    self.allocator.release(_name(module, name, ends))

    def backward(
        self,
        module: Hashable,
        ops: Sequence[Op],
        kept: frozenset[str],
        ends: Mapping[str, Hashable],
        sizes: Mapping[str, float],
    ) -> list[Hashable]:
        """Run the backward of operations, after recomputing results that were not kept.

        Args:
            module: name of the module.
            ops: operations of its forward.
            kept: names of the tensors that the forward kept.
            ends: names of the module's first input and result in neighbouring modules.
            sizes: sizes of tensors that are not results of operations.

        Returns:
            The weight gradients, in the order in which they were computed.
        """
        repeated = again(ops, kept)
        needed = saved_by(ops)
        made = {op.out for op in repeated}
        last = {n: op for op in repeated for n in (*op.inputs, op.out) if n in made}
        for op in repeated:
            self._make(module, op, ends)
            for name in dict.fromkeys((*op.inputs, op.out)):
                if last.get(name) is op and name not in needed:
                    self.allocator.release(_name(module, name, ends))
        there = (kept | made) & needed
        for name in kept - needed:
            self.allocator.release(_name(module, name, ends))
        readers = Counter(name for op in ops for name in set(op.saves))
        sizes = dict(sizes) | {op.out: op.size for op in ops}
        weights = []
        for op in reversed(ops):
            weights += self._gradients_of(module, op, ends, sizes)
            for name in set(op.saves):
                readers[name] -= 1
                if not readers[name] and name in there and not op.recycles:
                    self.allocator.release(_name(module, name, ends))
        return weights

    def seed(self, tensor: Hashable, size: float) -> None:
        """Allocate the gradient of a result, which comes from outside of the module."""
        self._gradients[tensor] = name = self.make(size)
        self._owners[name] += 1

    def drop_gradient(self, tensor: Hashable) -> None:
        """Free the gradient of an input, which has been used."""
        self._disown(self._gradients.pop(tensor))

    def catch_up(self) -> None:
        """Let the device finish everything that the host has launched."""
        self.free(self._pending)
        self._pending.clear()

    def _make(self, module: Hashable, op: Op, ends: Mapping[str, Hashable]) -> None:
        buffer = self.make(op.buffer) if op.buffer else None
        scratch = [self.make(size) for size in op.scratch]
        self.allocator.allocate(_name(module, op.out, ends), op.size)
        self.free(scratch)
        self._free_buffer(buffer)

    def _gradients_of(
        self, module: Hashable, op: Op, ends: Mapping[str, Hashable], sizes: Mapping[str, float]
    ) -> list[Hashable]:
        """Run the backward of one operation."""
        incoming = self._gradients.pop(_name(module, op.out, ends), None)
        if incoming is None:
            return []
        buffer = self.make(op.buffer) if op.buffer else None
        scratch = [self.make(size) for size in op.backward_scratch]
        for name in op.inputs:
            if op.passes:
                gradient = incoming
            elif op.recycles:
                gradient = _name(module, op.saves[0], ends)
            else:
                gradient = self.make(sizes[name])
            self._owners[gradient] += 1
            self._add(_name(module, name, ends), gradient, sizes[name])
        weights: list[Hashable] = [self.make(op.weight)] if op.weight else []
        self._disown(incoming)
        self.free(scratch)
        self._free_buffer(buffer)
        return weights

    def _add(self, tensor: Hashable, gradient: Hashable, size: float) -> None:
        """Add a gradient to a tensor's; in place, if nothing else holds the first one."""
        first = self._gradients.get(tensor)
        if first is None:
            self._gradients[tensor] = gradient
            return
        if self._owners[first] > 1:
            total = self.make(size)
            self._owners[total] += 1
            self._gradients[tensor] = total
            self._disown(first)
        self._disown(gradient)

    def _disown(self, gradient: Hashable) -> None:
        self._owners[gradient] -= 1
        if not self._owners[gradient]:
            del self._owners[gradient]
            self.allocator.release(gradient)

    def make(self, size: float, stream: str = "compute") -> Hashable:
        """Allocate an unnamed tensor, and return its key."""
        self._count += 1
        name = ("temporary", self._count)
        self.allocator.allocate(name, size, stream)
        return name

    def free(self, names: Iterable[Hashable]) -> None:
        """Free tensors by their keys."""
        for name in names:
            self.allocator.release(name)

    def _free_buffer(self, name: Hashable | None) -> None:
        if name is not None:
            self._pending.append(name)
            while len(self._pending) > self.lead:
                self.allocator.release(self._pending.popleft())


def _name(module: Hashable, name: str, ends: Mapping[str, Hashable]) -> Hashable:
    return ends.get(name, (module, name))
