"""Operations on shapes that are remembered, against torch's own rules for them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.rehearse.run import rehearse_ranks
from fivefold.rehearse.script import Script
from fivefold.rehearse.shadow import Shadow
from fivefold.rehearse.shapes import ShapesOnly
from tests.rehearse.test_rehearse import LAYOUTS, small
from tests.verify.cases import chosen


@torch.library.custom_op("fivefold_tests::inner", mutates_args=())
def inner(x: Tensor) -> Tensor:
    """A tensor that does not fill its storage."""
    return x.new_empty(9)[2:]


inner.register_fake(lambda x: x.new_empty(9)[2:])

ASKED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + x,
    "sum with int": lambda x: x + 1,
    "numbers": lambda x: [(x > 0) * number for number in (1.0, 1, True)],
    "strided": lambda x: x.t() * 2,
    "of a part": lambda x: x[1:, ::2].exp(),
    "view": lambda x: x.view(2, -1)[1].t(),
    "kept place": lambda x: x[2:].view(-1)[3:],
    "views": lambda x: x.split([1, 3])[1].unbind()[2],
    "two": lambda x: torch.sort(x, dim=0, stable=True),
    "list": lambda x: torch._foreach_mul([x, x.double()], 2.0),
    "in place": lambda x: x.mul_(2).add_(x),
    "list in place": lambda x: torch._foreach_add_([x], [x]),
    "out": lambda x: torch.mm(x, x.t(), out=x.new_empty(4, 4)),
    "out that grows": lambda x: torch.mm(x, x.t(), out=x.new_empty(0)),
    "other type": lambda x: x.to(torch.bfloat16).to(torch.float64),
    "itself": lambda x: x.to(x.dtype),
    "of a view": lambda x: x.t().contiguous().view(3, 2, 4).transpose(0, 2),
    "expanded": lambda x: x[:1].expand(4, 6).clone(),
    "unsafe view": lambda x: torch.ops.aten._unsafe_view(x, [3, 8]),
    "made": lambda x: (x.new_zeros(3), torch.empty(5, dtype=torch.float32), x.new_full((2,), 1)),
    "reduced": lambda x: (x.sum(0), x.sum(0, keepdim=True), x.amax(-1), x.mean()),
    "norm": lambda x: torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5),
    "nothing": lambda x: x[:0] @ x.t(),
    "part of its own": lambda x: inner(x),
    "other storage": lambda x: [y := x.clone(), z := x.clone(), y.set_(z)],
    "metadata": lambda x: x.clone().unsqueeze_(0).squeeze_(0).t_(),
}


def facts(found: Any) -> Any:
    """All that is known of tensors, and which of them share a storage."""
    if isinstance(found, list | tuple):
        return type(found), [facts(each) for each in found]
    if not isinstance(found, Tensor):
        return found
    placed = tuple(found.shape), found.stride(), found.storage_offset(), found.dtype, found.device
    return *placed, found.untyped_storage().nbytes()


def told(ask: Callable[[Tensor], Any]) -> Iterator[Any]:
    """What is made of three tensors, the third of which is not like the others."""
    with Shadow(gpus=False):
        for dtype in (torch.float32, torch.float32, torch.float64):
            x = torch.empty(4, 6, dtype=dtype)
            found = ask(x)
            results = found if isinstance(found, list | tuple) else [found]
            storages = [x.untyped_storage()._cdata] + [
                each.untyped_storage()._cdata for each in results if isinstance(each, Tensor)
            ]
            yield facts(found), [storages.index(storage) for storage in storages], x._version


@pytest.mark.parametrize("name", ASKED)
def test_what_is_remembered_is_what_torch_says(name: str) -> None:
    found = [*told(ASKED[name])]
    with patch.object(ShapesOnly, "run", by_rules):
        expected = [*told(ASKED[name])]
    assert found == expected


def by_rules(shapes: ShapesOnly, func: Any, args: Any, kwargs: Any) -> Any:
    with shapes:
        return func(*args, **kwargs)


def rehearsed(name: str) -> list[Script]:
    scripts = rehearse_ranks(small(name), (0, LAYOUTS[name][1] - 1))
    return [replace(script, seconds=0.0) for script in scripts]


@pytest.mark.parametrize(
    "name",
    chosen(
        LAYOUTS,
        "replicated pipeline",
        "experts",
    ),
)
def test_a_rehearsal_remembers_nothing_wrong(name: str) -> None:
    found = rehearsed(name)
    with patch.object(ShapesOnly, "run", by_rules):
        assert found == rehearsed(name)
