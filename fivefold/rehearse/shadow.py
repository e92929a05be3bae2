"""Runs a step on shapes: floating-point tensors hold nothing, and integers are really computed.

Integers are small and decide shapes, such as which token goes to which expert. So nothing that
decides anything is made up, except numbers that other ranks would send, see `Shadow`.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from fivefold.audit.calls import Call, call_of
from fivefold.audit.watch import Watch, replaced, tensors_in
from fivefold.rehearse.shapes import shapes_only

ATEN = torch.ops.aten
_INFERRED = ("aten::arange", "aten::full", "aten::scalar_tensor")
"""Makers of tensors that are whole where their arguments are."""
_BITS = torch.uint8
"""Type of the bits of real values, in 8 of them or in messages: integers that decide no shape."""


class Shadow(Watch):
    """Gives floating-point tensors no values, and answers for the absent ranks.

    Every other rank is assumed to hold the same integers as this one: an all-gather yields this
    rank's own part, an all-to-all what it would send to itself, and a sum its own value times the
    number of ranks. A number that the host reads off a tensor without values is 1.

    Args:
        gpus: whether tensors stand for those on GPUs.
    """

    def __init__(self, *, gpus: bool) -> None:
        super().__init__()
        self._shapes = shapes_only(gpus=gpus)
        self._stand_ins: dict[tuple[Any, ...], Tensor] = {}
        self._work = _finished_work() if gpus else _work_to_be_waited_for()
        # Integers of messages by group and number of elements: what was sent last, and buffers
        # that wait for it.
        self._sent: dict[tuple[str, int], Tensor] = {}
        self._open: dict[tuple[str, int], list[Tensor]] = {}

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        block.enter_context(replaced(FakeTensor, "tolist", _read_at_once))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = call_of(func, args)
        if call is not None:
            self._answer(call)
            return _outcome(func, args, self._work)
        tensors = [*tensors_in([*args, *kwargs.values()])]
        shadows = sum(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not shadows:
            if func.namespace == "profiler" or _holds_values(func, tensors, args, kwargs):
                return func(*args, **kwargs)
            return self._shapes.run(func, args, kwargs)
        if func is ATEN._local_scalar_dense.default:
            return _one(args[0])
        if func._schema.is_mutable:
            target = args[0] if args else None
            if isinstance(target, Tensor) and not isinstance(target, FakeTensor):
                return target  # what is unknown is not written into what is known
        if shadows < len(tensors):
            args, kwargs = tree_map_only(Tensor, self._shape_of, (args, kwargs))
        return self._shapes.run(func, args, kwargs)

    def _shape_of(self, tensor: Tensor) -> Tensor:
        """A tensor without values instead of one with values, which is only read."""
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return tensor
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._stand_ins:
            with self._shapes:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            self._stand_ins[key] = made
        return self._stand_ins[key]

    def _answer(self, call: Call) -> None:
        """Fill in the integers that other ranks would send."""
        if any(isinstance(tensor, FakeTensor) for tensor in (*call.gives, *call.gets)):
            return
        ranks, rank = call.group.size(), call.group.rank()
        match call.op:
            case "all_reduce":
                for tensor in call.gets:
                    tensor.mul_(ranks)
            case "all_gather":
                _copy_to_all(call.gets, call.gives[0], ranks)
            case "reduce_scatter":
                whole = torch.cat([tensor.flatten() for tensor in call.gives])
                call.gets[0].copy_(whole.chunk(ranks)[rank].view_as(call.gets[0]) * ranks)
            case "all_to_all":
                both = zip((call.gives, call.gets), call.parts, strict=True)
                gives, gets = (_by_rank(tensors, sizes) for tensors, sizes in both)
                _copy_to_all(gets, gives[rank], ranks)
            case "send":
                key = (call.group.group_name, call.gives[0].numel())
                self._sent[key] = call.gives[0].detach().clone()
                for buffer in self._open.pop(key, []):
                    buffer.copy_(self._sent[key].view_as(buffer))
            case "receive":
                key = (call.group.group_name, call.gets[0].numel())
                if key in self._sent:
                    call.gets[0].copy_(self._sent[key].view_as(call.gets[0]))
                else:
                    self._open.setdefault(key, []).append(call.gets[0])


def _holds_values(
    func: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an operation without shadows among its arguments runs unchanged."""
    device = kwargs.get("device")
    away = device is not None and torch.device(device).type == "meta"
    if tensors:
        return away or device is None or any(t.device.type != "meta" for t in tensors)
    dtype = kwargs.get("dtype")
    if dtype is None and func.name().partition(".")[0] in _INFERRED:
        numbers = [value for value in args if isinstance(value, int | float)]
        dtype = torch.int64 if all(isinstance(n, int) for n in numbers) else None
    return away or not (dtype is None or dtype.is_floating_point or dtype is _BITS)


def _copy_to_all(targets: tuple[Tensor, ...], source: Tensor, ranks: int) -> None:
    """Give every target, or each of as many equal parts of one, the value of `source`."""
    if len(targets) < ranks:
        targets = targets[0].flatten().chunk(ranks)
    for target in targets:
        target.copy_(source.reshape(target.shape))


def _by_rank(tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The parts that an all-to-all of this many bytes sends to, or gets from, each rank."""
    if len(tensors) == len(sizes):
        return tensors
    (whole,) = tensors
    return whole.view(-1).split([size // whole.element_size() for size in sizes])


def _one(tensor: Tensor) -> int | float | bool:
    if tensor.dtype.is_floating_point:
        return 1.0
    return True if tensor.dtype == torch.bool else 1


def _read_at_once(tensor: Tensor) -> Any:
    """`Tensor.tolist` by one operation, as on a device; torch's own reads each number of a tensor
    without values by several."""
    found: Any = tensor.flatten()[0].item() if tensor.numel() else None
    for size in reversed(tensor.shape):
        found = [found] * size
    return found


def _finished_work() -> Any:
    from torch._C import _distributed_c10d as private

    make: Any = getattr(private, "_create_work_from_future")  # noqa: B009
    future: Any = torch.futures.Future()
    future.set_result(None)
    return make(future).boxed()


def _work_to_be_waited_for() -> Any:
    """Work like gloo's, which ends only when somebody waits for it."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def _outcome(func: Any, args: tuple[Any, ...], work: Any) -> Any:
    """The result of an operation of torch.distributed: its work, and mostly its first argument."""
    return work if len(func._schema.returns) == 1 else (args[0], work)
