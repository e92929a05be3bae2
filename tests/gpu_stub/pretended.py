"""Numbers where nothing computes any: those on which it depends what the host does next."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.audit.watch import replaced
from fivefold.expert import dispatch
from fivefold.model.eight_bit.groups import EightBitExperts
from fivefold.model.moe import balance
from fivefold.model.moe import layer as experts
from fivefold.model.moe.grouped import PlainGroups
from fivefold.model.moe.permutation import Rows
from fivefold.model.moe.routing import ExpertChoice
from fivefold.train.step_result import DeviceResult, StepResult


@contextmanager
def pretending() -> Iterator[None]:
    """Steps are finite, half of the rows that may be dropped are, half of a mask is true, all
    experts and ranks have equally many rows, and Sinkhorn's rounds end."""
    with ExitStack() as stack:
        stack.enter_context(replaced(DeviceResult, "read", _read))
        stack.enter_context(replaced(dispatch._RowExchange, "_moved", _moved))
        stack.enter_context(replaced(dispatch, "join", _join))
        for module in (dispatch, experts):
            stack.enter_context(replaced(module, "by_expert", _by_expert))
        for products in (PlainGroups, EightBitExperts):
            stack.enter_context(replaced(products, "ends", partialmethod(_ends, products.ends)))
        stack.enter_context(replaced(Tensor, "nonzero", _nonzero))
        stack.enter_context(replaced(balance, "SINKHORN_ROUNDS", 3))
        yield


_read_memory = DeviceResult.read
_find = Tensor.nonzero
_move = dispatch._RowExchange._moved
_sort = experts.by_expert
_put_together = dispatch.join


def _read(result: DeviceResult) -> StepResult:
    with suppress(ValueError, OverflowError):  # of what memory held
        _read_memory(result)
    return StepResult(1.0, 1.0, result.rates.lr, 1, extra=dict.fromkeys(result.extra, 0.0))


def _by_expert(choice: ExpertChoice, kept: int | None = None) -> tuple[Rows, Tensor]:
    rows, rows_E = _sort(choice, kept)
    if choice.kept_TK is not None and kept is None:
        rows, rows_E = _sort(choice, choice.kept_TK.numel() // 2)
    return rows, rows_E


def _nonzero(x: Tensor, *, as_tuple: bool = False) -> Any:
    if not x.is_cuda:
        return _find(x, as_tuple=as_tuple)
    x.any().item()  # waits, as the operation does
    places = x.new_zeros(x.numel() // 2, x.ndim, dtype=torch.int64)
    return places.unbind(1) if as_tuple else places


def _ends(
    products: Any, read: Callable[..., Any], x_TH: Tensor, rows_E: Tensor, weights: Sequence[Tensor]
) -> list[int] | None:
    if read(products, x_TH, rows_E, weights) is None:
        return None
    return [len(x_TH) * (expert + 1) // len(rows_E) for expert in range(len(rows_E))]


def _join(x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    rows[:] = [len(x)] * group.size()
    return _put_together(x, rows, group)


def _moved(
    way: Any, parts: Sequence[Tensor], sent: list[int], got: list[int], beside: Any
) -> list[Tensor]:
    if way.group is not None and not way.even:
        ranks = way.group.size()
        if sent is way.sent:  # there, not back
            each, more = divmod(len(parts[0]), ranks)
            way.sent[:] = [each + (rank < more) for rank in range(ranks)]
            way.got[:] = [each + (way.group.rank() < more)] * ranks
    return _move(way, parts, sent, got, beside)
