"""Operations on tensors that have a shape and no values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from fivefold.audit.watch import tensors_in

_CPU = torch.device("cpu")
_PLAIN = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


@dataclass(frozen=True)
class _New:
    """A tensor that an operation creates, with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Given:
    """A result that is one of the arguments: its position or keyword."""

    place: int | str


_Part = _New | _Given | None


@dataclass(frozen=True)
class _Result:
    """The result of an operation.

    Attributes:
        parts: the elements of a list or tuple; or one part.
        kind: list or tuple; None: the one part itself.
    """

    parts: tuple[_Part, ...]
    kind: type | None


class ShapesOnly(FakeTensorMode):
    """torch's tensors without values, with a cache of their shapes.

    torch caches the shape rules of an operation by everything that may matter to a compiler, which
    takes longer than the rest of an operation here. A step repeats few operations often, so here
    they are cached by the shapes and numbers that they get.

    Args:
        gpus: whether they stand for tensors on GPUs.
    """

    def __init__(self, *, gpus: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.stands_for_gpu = gpus
        self._known: dict[Any, _Result] = {}
        # What torch's constructor sets, which takes it most of its time, and is alike for all.
        self._alike = vars(FakeTensor(self, torch.empty(0, device="meta"), _CPU))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply torch's rule, except for an operation that torch 2.11 mistakes for another one."""
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation none of whose tensors has values."""
        key = _key_of(func, args, kwargs)
        if key is not None and func.is_view:
            return self._view(func, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            return self._again(known, args, kwargs)
        with self:
            result = func(*args, **kwargs)
        if key is not None and key == _key_of(func, args, kwargs):  # it changed no shape
            found = _result(result, args, kwargs)
            if found is not None:
                self._known[key] = found
        return result

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return self._fake(result)
        return type(result)([self._fake(view) for view in result])

    def _fake(self, meta: Tensor) -> FakeTensor:
        """As `FakeTensor(self, meta, _CPU)`."""
        result: FakeTensor = Tensor._make_subclass(
            FakeTensor,
            meta,
            meta.requires_grad,
            dispatch_device=True,
            device_for_backend_keys=_CPU,
        )
        torch._C._set_throw_on_mutable_data_ptr(result)
        vars(result).update(self._alike)
        return result

    def _again(self, known: _Result, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if known.kind is None:
            return self._part(known.parts[0], args, kwargs)
        return known.kind([self._part(part, args, kwargs) for part in known.parts])

    def _part(self, part: _Part, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(part, _New):
            meta = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
            return self._fake(meta)
        if part is None:
            return None
        return args[part.place] if isinstance(part.place, int) else kwargs[part.place]


@cache
def shapes_only(*, gpus: bool) -> ShapesOnly:
    """The one for all ranks that a process rehearses, whose operations have mostly the same
    shapes."""
    return ShapesOnly(gpus=gpus)


def _key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Everything that decides the shapes an operation creates; None: not known."""
    if torch.Tag.inplace_view in func.tags:
        return None
    try:
        return func, _key(args), _key(tuple(kwargs.items()))
    except TypeError:
        return None


def _key(value: Any) -> Any:
    """What decides shapes in an argument.

    Raises:
        TypeError: it is of another kind than most.
    """
    if isinstance(value, FakeTensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, bool | int | float):
        return type(value), value  # 1, 1.0 and True are equal, and make other types
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return tuple([_key(each) for each in value])
    raise TypeError


def _result(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Result | None:
    """A recipe to recreate a result; None: only the operation itself can."""
    places: dict[int, int | str] = {id(value): place for place, value in enumerate(args)}
    places |= {id(value): name for name, value in kwargs.items()}
    taken = {x.untyped_storage()._cdata for x in tensors_in([*args, *kwargs.values()])}
    parts: list[_Part] = []
    for each in result if isinstance(result, list | tuple) else [result]:
        if each is None:
            parts.append(None)
        elif id(each) in places:
            parts.append(_Given(places[id(each)]))
        elif isinstance(each, FakeTensor) and _fills(each, taken):
            taken.add(each.untyped_storage()._cdata)
            parts.append(_New(tuple(each.shape), each.stride(), each.dtype))
        else:
            return None
    return _Result(tuple(parts), type(result) if isinstance(result, list | tuple) else None)


def _fills(tensor: FakeTensor, taken: set[int]) -> bool:
    """Whether a tensor has a storage of its own, as large as its elements need."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needs = (last + 1) * tensor.element_size() if tensor.numel() else 0
    storage = tensor.untyped_storage()
    own = storage._cdata not in taken and tensor.fake_device == _CPU
    return own and storage.nbytes() == needs
