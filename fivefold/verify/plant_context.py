"""Context-parallel errors to plant: missing keys, lost gradients, wrong order, wrong positions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.context.attention import HeadAssignment, KVExchangeAttention, UlyssesAttention
from fivefold.context.transport import Backward, OwnTokens, Transport
from fivefold.model.attention.blocks import common
from fivefold.model.attention.blockwise import Keys
from fivefold.model.attention.grouped_query import AttentionBlock, Kernel
from fivefold.model.batch import Batch
from fivefold.model.shards import MicrobatchShare
from fivefold.train.engine import Engine


def skip_last_block(engine: Engine) -> None:
    """Skip the keys that arrive last."""
    _change_transports(engine, _SkipsLastKeys)


def lose_gradients(engine: Engine) -> None:
    """Do not send gradients of other ranks' keys back to them."""
    _change_transports(engine, _LosesGradients)


def leave_rank_order(engine: Engine) -> None:
    """Leave exchanged tokens in the order of the ranks instead of that of the rows."""

    def change(kernel: Kernel) -> Kernel:
        assert isinstance(kernel, UlyssesAttention), "only heads are exchanged for tokens"
        return _RankOrder(kernel.group, kernel.inner, kernel.outer_rank)

    _change_kernels(engine, change)


def count_local_positions(engine: Engine) -> None:
    """Count positions from the first token of the rank's part."""
    divided = engine.divided

    def miscounted(batch: Batch) -> Batch:
        part = divided(batch)
        return replace(part, positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))

    engine.divided = miscounted  # type: ignore[method-assign]


def _change_kernels(engine: Engine, change: Callable[[Kernel], Kernel]) -> None:
    for stage in engine.model.stages.values():
        for layer in stage.transformer_layers:
            if isinstance(layer.self_attn, AttentionBlock):
                layer.self_attn.kernel = change(layer.self_attn.kernel)


def _change_transports(engine: Engine, wrap: Callable[[Transport], Transport]) -> None:
    def change(kernel: Kernel) -> Kernel:
        if isinstance(kernel, KVExchangeAttention):
            return KVExchangeAttention(wrap(kernel.transport))
        assert isinstance(kernel, UlyssesAttention), "a kernel without a transport"
        return replace(kernel, inner=change(kernel.inner))

    _change_kernels(engine, change)


@dataclass(frozen=True)
class _SkipsLastKeys:
    inner: Transport

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """All but the last keys, unless they are the only ones."""
        every = list(self.inner.forward(own))
        yield from every[:-1] or every

    def backward(self, own: OwnTokens) -> Backward:
        """Unchanged."""
        return self.inner.backward(own)


@dataclass(frozen=True)
class _LosesGradients:
    inner: Transport

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """Unchanged."""
        return self.inner.forward(own)

    def backward(self, own: OwnTokens) -> Backward:
        """Zero gradients for other ranks' keys."""
        steps = self.inner.backward(own)
        keys = next(steps)
        while True:
            grads = yield keys
            try:
                keys = steps.send(grads * _mine(keys, own))
            except StopIteration as end:
                return end.value


def _mine(keys: Keys, own: OwnTokens) -> Tensor:
    """1 for the rank's own keys, 0 for others: [L, 1, 1]."""
    mine = [
        float(bool(common(own.part.spans, ((place, place + 1),))))
        for start, stop in keys.spans
        for place in range(start, stop)
    ]
    return own.kv.new_tensor(mine)[:, None, None]


class _RankOrder(UlyssesAttention):
    def assignment(self, part: MicrobatchShare, q_BSND: Tensor, k_BSGD: Tensor) -> HeadAssignment:
        assignment = super().assignment(part, q_BSND, k_BSGD)
        return _Unordered(**vars(assignment))


class _Unordered(HeadAssignment):
    def in_order(self, by_rank: list[Tensor]) -> Tensor:
        """Concatenates in the order of the ranks."""
        return torch.cat(by_rank, dim=1)

    def by_rank(self, x_BSF: Tensor) -> list[Tensor]:
        """The inverse of `in_order`."""
        return list(x_BSF.chunk(self.group.size(), dim=1))
