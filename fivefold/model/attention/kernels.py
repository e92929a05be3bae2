"""Attention kernels for one block of queries and one block of keys, forward and backward.

The forward returns the output and its log-sum-exp, by which blocks are merged. The backward takes
the output and log-sum-exp over *all* keys, so that blocks stay independent. Shapes: B batch,
N query heads, G key/value heads, q queries, k keys, D features; tensors may be strided.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.attention.blocks import Block, Visibility
from fivefold.model.attention.cuda_kernels import (
    ATEN,
    CudnnOnCuda,
    Differentiated,
    FlashOnCuda,
    Flex,
    Grads,
    OwnOnCuda,
    lacking_cudnn,
    lacking_flash,
    lacking_flex,
    runs_own,
)
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.dropout import PairDropout

ROWS = 256  # queries per step of the plain kernel, which bounds the probabilities it holds


class BlockKernel(Protocol):
    """An implementation of attention on one block."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Output [B, N, q, D], and log-sum-exp [B, N, q] in at least fp32."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """Gradients of q, k and v; `out` and `lse` are over all keys."""


def choose_kernel(
    q: Tensor, v: Tensor, drop: PairDropout | None = None, scores: Scores = USUAL
) -> BlockKernel:
    """The fastest kernel that supports these queries and values, dropout and scores.

    Args:
        q: queries.
        v: values.
        drop: dropout of the probabilities between all queries and keys that blocks are of.
        scores: how scores are made of q k^T.
    """
    if drop is not None or not scores.by_any_kernel:
        kind = OwnOnCuda if runs_own(q, v, None if drop is None else drop.heads) else Plain
        return kind(drop, scores)
    name = next(name for name, (_, lacking) in KERNELS.items() if not lacking(q, v))
    kernel = kernel_of(name, scores.scale)
    equal = name == "plain" or q.shape[-1] == v.shape[-1]
    return kernel if equal else Padded(kernel)


def visible(block: Block, device: torch.device) -> Tensor | None:
    """Mask of the keys each query of a block sees: bool [q, k]; None if all."""
    if block.kind == Visibility.FULL:
        return None
    q = torch.arange(block.q[1] - block.q[0], device=device)[:, None] + block.shift
    k = torch.arange(block.k[1] - block.k[0], device=device)
    seen = k <= q
    return seen if block.kind == Visibility.CAUSAL else seen & (q - k <= block.window)


@dataclass(frozen=True)
class Plain:
    """Attention by its definition, `ROWS` queries at a time, with sums in at least fp32.

    Attributes:
        drop: dropout of the probabilities between all queries and keys that blocks are of.
        scores: how scores are made of q k^T.
    """

    drop: PairDropout | None = None
    scores: Scores = USUAL

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        seen, scale = visible(block, q.device), self.scores.factor(q.shape[-1])
        outs, lses = [], []
        for rows, keys in _rows(block):
            scores = self._scores(q[:, :, rows] * scale, k[:, :, keys], seen, rows)
            lse = scores.logsumexp(-1)
            self.scores.note(scores.amax(-1))
            p = self._drop((scores - lse[..., None]).exp(), block, rows, keys)
            outs.append((_grouped(p, v) @ v[:, :, None, keys]).flatten(1, 2))
            lses.append(lse)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `BlockKernel`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        grad, q, k, v = grad.to(wide), q.to(wide), k.to(wide), v.to(wide)
        delta = (grad * out.to(wide)).sum(-1)
        seen, scale = visible(block, q.device), self.scores.factor(q.shape[-1])
        dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in _rows(block):
            scores = self._scores(q[:, :, rows] * scale, k[:, :, keys], seen, rows)
            p = (scores - lse[:, :, rows, None]).exp()
            kept = self._drop(p, block, rows, keys)
            of = _grouped(grad[:, :, rows], v)
            dv[:, :, keys] += (_grouped(kept, v).transpose(3, 4) @ of).sum(2)
            dp = (of @ v[:, :, None, keys].transpose(3, 4)).flatten(1, 2)
            dp = self._drop(dp, block, rows, keys)
            ds = self.scores.through(p * (dp - delta[:, :, rows, None]), scores)
            ds = _grouped(ds, k) * scale
            dqs.append((ds @ k[:, :, None, keys]).flatten(1, 2))
            dk[:, :, keys] += (ds.transpose(3, 4) @ _grouped(q[:, :, rows], k)).sum(2)
        return torch.cat(dqs, 2), dk, dv

    def _scores(self, q: Tensor, k: Tensor, seen: Tensor | None, rows: slice) -> Tensor:
        products = (_grouped(q, k) @ k[:, :, None].transpose(3, 4)).flatten(1, 2)
        scores = self.scores.of(products)
        if seen is None:
            return scores
        return scores.masked_fill(~seen[rows, : k.shape[2]], float("-inf"))

    def _drop(self, p: Tensor, block: Block, rows: slice, keys: slice) -> Tensor:
        if self.drop is None:
            return p
        return self.drop.between(slice(*block.q), slice(*block.k)).between(rows, keys)(p)


def _rows(block: Block) -> Iterator[tuple[slice, slice]]:
    """Pieces of queries, and how many of the first keys each piece sees."""
    count, every = (stop - start for start, stop in (block.q, block.k))
    for start in range(0, count, ROWS):
        seen = min(start + ROWS, every) if block.kind == Visibility.CAUSAL else every
        yield slice(start, start + ROWS), slice(seen)


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """[B, N, ...] -> [B, G, N / G, ...]: query heads grouped by key/value head."""
    return x.unflatten(1, (keys.shape[1], -1))


@dataclass(frozen=True)
class Padded:
    """Adapter for values with fewer features than queries and keys: pads them with zeros.

    Attributes:
        kernel: kernel that needs equal feature sizes.
    """

    kernel: BlockKernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        out, lse = self.kernel.forward(q, k, padded(v, q.shape[-1]), block)
        return out[..., : v.shape[-1]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `BlockKernel`."""
        grad, wide_v, out = (padded(x, q.shape[-1]) for x in (grad, v, out))
        dq, dk, dv = self.kernel.backward(grad, q, k, wide_v, out, lse, block)
        return dq, dk, dv[..., : v.shape[-1]]


def padded(x: Tensor, features: int) -> Tensor:
    """`x` padded with zeros to this many features."""
    lacking = features - x.shape[-1]
    return F.pad(x, (0, lacking)) if lacking else x


@dataclass(frozen=True)
class FlashOnCpu:
    """PyTorch's tiled CPU kernel: any dtype including fp64, grouped heads without copies.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
    """

    scale: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        causal = block.kind == Visibility.CAUSAL
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(q, block), scale=self.scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `BlockKernel`."""
        causal = block.kind == Visibility.CAUSAL
        grads: Grads = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(q, block), scale=self.scale
        )
        return grads


def _bias(q: Tensor, block: Block) -> Tensor | None:
    """Additive mask of a BAND: 0 or minus infinity; None for other blocks."""
    if block.kind != Visibility.BAND:
        return None
    seen = visible(block, q.device)
    assert seen is not None
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(
        ~seen, float("-inf")
    )


def _lacking_on_cpu(q: Tensor) -> str:
    return "" if q.device.type == "cpu" else "it runs on CPUs"


def _with_values(lacking: Callable[[Tensor], str]) -> Callable[[Tensor, Tensor], str]:
    """Extends a check of queries to values, which are padded to the size of queries."""

    def lacks(q: Tensor, v: Tensor) -> str:
        if v.shape[-1] <= q.shape[-1]:
            return lacking(q)
        sizes = f"{v.shape[-1]} > {q.shape[-1]}"
        return lacking(q) or f"values must not have more features than queries, {sizes}"

    return lacks


Make = Callable[[float | None], BlockKernel]
KERNELS: Mapping[str, tuple[Make, Callable[[Tensor, Tensor], str]]] = MappingProxyType(
    {
        "flash_cpu": (FlashOnCpu, _with_values(_lacking_on_cpu)),
        "cudnn": (CudnnOnCuda, _with_values(lacking_cudnn)),
        "flash_cuda": (FlashOnCuda, _with_values(lacking_flash)),
        "flex": (lambda scale: Differentiated(Flex(scale)), _with_values(lacking_flex)),
        "plain": (lambda scale: Plain(None, Scores(scale)), lambda q, v: ""),
    }
)
"""By name, fastest first: what makes the kernel of a scale, and why it does not support given
tensors ('' if it does)."""


@cache
def kernel_of(name: str, scale: float | None = None) -> BlockKernel:
    """The kernel of a name in KERNELS, made once: a new one would be compiled again."""
    return KERNELS[name][0](scale)
