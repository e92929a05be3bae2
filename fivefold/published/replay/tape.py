"""A forward and its backward, tensor by tensor: what autograd makes, keeps and frees."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fivefold.published.replay.allocator import Allocator


@dataclass(frozen=True)
class Op:
    """An operation; sizes are bytes, names those of tensors of the same module.

    Attributes:
        out: what it makes.
        size: of that.
        inputs: tensors that it reads and that get a gradient.
        saves: tensors that its backward reads.
        weight: bytes of the gradient of its weight.
        buffer: buffer of a collective that belongs to it, there for a moment in forward and
            backward.
        scratch: tensors made and freed inside the forward.
        backward_scratch: the same of the backward.
        outlives: tensors that some variable holds until this operation has run.
        passes: the gradient of the result is that of every input, as a sum's is.
        recycles: the saved tensor is turned into the gradient of the input in place.
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
    """Every tensor that some backward reads."""
    return frozenset(name for op in ops for name in op.saves)


def again(ops: Sequence[Op], kept: frozenset[str]) -> list[Op]:
    """The operations that a backward must run again when only `kept` was kept, in order."""
    wanted = {name for op in ops for name in op.saves} - kept
    found = []
    for op in reversed(ops):
        if op.out in wanted:
            found.append(op)
            wanted |= set(op.inputs) - kept
    return found[::-1]


@dataclass
class Tape:
    """Runs modules on an allocator.

    A module's tensors are called (module, name); `ends` gives its first input and its result the
    names by which its neighbours know them.

    Attributes:
        allocator: allocator of the device.
        lead: collectives by which the host is ahead of the device at most. Their buffers are free
            when the device is done with them, which the host learns that much later.
    """

    allocator: Allocator
    lead: int = 0
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
        """Runs operations; what no later one reads is freed, unless it is kept."""
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
        """Runs the gradients of operations, after those that were not kept were run again.

        Args:
            module: module whose forward ran.
            ops: ops of the forward.
            kept: what that kept.
            ends: names of the module's ends.
            sizes: sizes of tensors that no operation made.

        Returns:
            The gradients of weights, in the order in which they were made.
        """
        repeated = again(ops, kept)
        needed = saved_by(ops)
        if repeated:
            made = {op.out for op in repeated}
            last = {n: op for op in repeated for n in (*op.inputs, op.out) if n in made}
            for op in repeated:
                self._make(module, op, ends)
                for name in dict.fromkeys((*op.inputs, op.out)):
                    if last.get(name) is op and name not in needed:
                        self.allocator.release(_name(module, name, ends))
        there = (kept | {op.out for op in repeated}) & needed
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
        """The gradient of a result, from outside."""
        self._gradients[tensor] = name = self.make(size)
        self._owners[name] += 1

    def drop_gradient(self, tensor: Hashable) -> None:
        """The gradient of an input has been used."""
        self._disown(self._gradients.pop(tensor))

    def catch_up(self) -> None:
        """The device has done all that was asked of it."""
        for name in self._pending:
            self.allocator.release(name)
        self._pending.clear()

    def _make(self, module: Hashable, op: Op, ends: Mapping[str, Hashable]) -> None:
        buffer = self.make(op.buffer) if op.buffer else None
        scratch = [self.make(size) for size in op.scratch]
        self.allocator.allocate(_name(module, op.out, ends), op.size)
        self._free_all(scratch)
        self._free_buffer(buffer)

    def _gradients_of(
        self, module: Hashable, op: Op, ends: Mapping[str, Hashable], sizes: Mapping[str, float]
    ) -> list[Hashable]:
        """The backward of one operation."""
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
        weights = [self.make(op.weight)] if op.weight else []
        self._disown(incoming)
        self._free_all(scratch)
        self._free_buffer(buffer)
        return list(weights)

    def _add(self, tensor: Hashable, gradient: Hashable, size: float) -> None:
        """A gradient of a tensor: a second one is added in place if nobody else holds the first."""
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
        """A tensor without a name of its own."""
        self._count += 1
        name = ("temporary", self._count)
        self.allocator.allocate(name, size, stream)
        return name

    def _free_all(self, names: Iterable[Hashable]) -> None:
        for name in names:
            self.allocator.release(name)

    def _free_buffer(self, name: Hashable | None) -> None:
        if name is not None:
            self._pending.append(name)
            while len(self._pending) > self.lead:
                self.allocator.release(self._pending.popleft())


def _name(module: Hashable, name: str, ends: Mapping[str, Hashable]) -> Hashable:
    return ends.get(name, (module, name))
