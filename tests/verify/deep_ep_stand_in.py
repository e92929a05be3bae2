"""What stands for the package deep_ep where there is no GPU: its `Buffer`, over gloo.

Names and order of arguments, types, shapes and what is undefined are those of
deep_ep/buffers/legacy.py (release 2.1; deep_ep/buffer.py before 2.0). What a kernel writes is there
only once its event was waited for, and is not a number before; what it reads was launched before
the event that it waits for.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.audit.launches import Launches
from fivefold.mesh.collectives import all_gather, all_to_all

Handle = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


launched = Launches()
"""Counts what this process launches, where it is entered."""


class Event:
    """An `EventOverlap`: what happens once it is waited for.

    Whoever waits for it waits for nothing that is launched after it.
    """

    def __init__(self, lands: Callable[[], None] = lambda: None) -> None:
        self._lands, self._at = lands, launched.count

    @property
    def is_last(self) -> bool:
        return self._at == launched.count

    def current_stream_wait(self) -> None:
        self._lands()


class SizeHints:
    """A `Config`."""

    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class StandInBuffer:
    """A `Buffer` of one node."""

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        self.group, self.group_size = group, group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        StandInBuffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> Event:
        return Event()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> SizeHints:
        return SizeHints(StandInBuffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> SizeHints:
        return SizeHints(StandInBuffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Event]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        here = num_experts // self.group_size
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen = chosen.scatter_(1, topk_idx % (num_experts + 1), True)[:, :-1]
        in_rank = chosen.unflatten(1, (-1, here)).any(2)
        landed = _undefined(async_finish, in_rank.sum(0).int(), chosen.sum(0).int(), in_rank)
        (each_rank, each_expert, in_rank), event = landed
        return each_rank, None, each_expert, in_rank, event

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: SizeHints | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Handle | None, Event]:
        assert x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            sent_from, in_rank, worst = handle[0], handle[4], len(handle[3])
            (again,), event = _undefined(
                async_finish, _longer(self._send(x, in_rank, sent_from), worst, float("nan"))
            )
            return again, None, None, None, None, event
        assert is_token_in_rank is not None and num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None and topk_idx is not None
        assert topk_weights is not None and topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.promote_types(x.dtype, torch.float32)
        in_rank, here = is_token_in_rank, len(num_tokens_per_expert) // self.group_size
        assert in_rank.dtype == torch.bool and num_tokens_per_rank.dtype == torch.int32
        assert torch.equal(num_tokens_per_rank, in_rank.sum(0).int())
        counts = all_gather(num_tokens_per_rank[None], self.group)  # [from, to]
        rows, experts, weights = (
            self._send(each, in_rank, counts) for each in (x, topk_idx, topk_weights)
        )
        local = experts - self.group.rank() * here
        elsewhere = (local < 0) | (local >= here) | (experts < 0)
        local, weights = local.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0.0)
        each = [int((local == expert).sum()) for expert in range(here)]
        size = num_worst_tokens or len(rows)
        assert len(rows) <= size, "more tokens than were said to be the worst"
        (rows, local, weights), event = _undefined(
            async_finish,
            _longer(rows, size, float("nan")),
            _longer(local, size, -1),
            _longer(weights, size, float("nan")),
        )
        empty = torch.empty(0, dtype=torch.int32)
        source = torch.zeros(size, dtype=torch.int32)
        made = (counts, empty, empty, source, in_rank, empty)
        return rows, local, weights, [] if num_worst_tokens else each, made, event

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: SizeHints | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Event]:
        counts, source, in_rank = handle[0], handle[3], handle[4]
        assert x.dim() == 2 and x.is_contiguous() and len(x) == len(source) and bias is None
        self._begin(previous_event, async_finish, allocate_on_comm_stream)
        found = [self._sum(x, in_rank, counts)]
        if topk_weights is not None:
            assert topk_weights.is_contiguous() and len(topk_weights) == len(x)
            found.append(self._sum(topk_weights, in_rank, counts))
        (y, *weights), event = _undefined(async_finish, *found)
        return y, weights[0] if weights else None, event

    def _begin(self, previous: Event | None, finishes_later: bool, on_comm_stream: bool) -> None:
        assert not on_comm_stream or (previous is not None and finishes_later)
        if previous is not None:
            assert previous.is_last, "a kernel waits for an event before what it reads"
            previous.current_stream_wait()

    def _send(self, x: Tensor, in_rank: Tensor, counts: Tensor) -> Tensor:
        """Tokens -> rows, sorted by the rank from which they come."""
        got = counts[:, self.group.rank()].tolist()
        out = x.new_empty(sum(got), *x.shape[1:])
        all_to_all([x[goes] for goes in in_rank.unbind(1)], list(out.split(got)), self.group)
        return out

    def _sum(self, x: Tensor, in_rank: Tensor, counts: Tensor) -> Tensor:
        """Rows -> sums of tokens, in fp32 at least; rows behind those that came are not read."""
        got = counts[:, self.group.rank()].tolist()
        parts = [x.new_empty(int(n), *x.shape[1:]) for n in in_rank.sum(0)]
        all_to_all(list(x[: sum(got)].split(got)), parts, self.group)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.zeros(len(in_rank), *x.shape[1:], dtype=wide)
        for goes, part in zip(in_rank.unbind(1), parts, strict=True):
            y[goes] += part
        return y.to(x.dtype)


def _longer(x: Tensor, size: int, rest: float) -> Tensor:
    return torch.cat([x, x.new_full((size - len(x), *x.shape[1:]), rest)])


def _undefined(later: bool, *found: Tensor) -> tuple[list[Tensor], Event]:
    """What will be found, and the event that fills it in."""
    if not later:
        return list(found), Event()
    shown = [torch.full_like(x, float("nan") if x.is_floating_point() else 1) for x in found]

    def land() -> None:
        for x, y in zip(shown, found, strict=True):
            x.copy_(y)

    return shown, Event(land)


def package() -> ModuleType:
    """The module."""
    made = ModuleType("deep_ep")
    made.Buffer = StandInBuffer  # type: ignore[attr-defined]
    return made
