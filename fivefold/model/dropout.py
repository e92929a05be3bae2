"""Dropout with masks that are a function of the element, so that every layout drops the same.

An element's mask bit hashes (seed, step, site, row, column). The row is a token's index in the
whole run and the column a feature or a key token, so recomputation also drops the same elements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fivefold.mesh.device import runs_triton, uses_gpu_kernels
from fivefold.model.random_bits import random_bits
from fivefold.model.seeds import derive_seed
from fivefold.model.traced import result

AT_A_TIME = 1 << 18
"""Elements whose mask a CPU makes at a time: 2 MiB of random bits."""


def threshold(p: float) -> int:
    """The int64 number below which a share `p` of all random bits is."""
    return round(p * 2**64) - 2**63


def drop_mask(rows: Tensor, columns: Tensor, p: float, key: int | Tensor) -> Tensor:
    """True, with probability `p`, where an element is dropped.

    Args:
        rows: int64, broadcast against `columns`.
        columns: int64.
        p: probability in [0, 1).
        key: int64 scalar that identifies the site and step; different keys give independent masks.
    """
    return random_bits(rows, columns, key) < threshold(p)


@dataclass(frozen=True, eq=False)
class Mask:
    """Which elements of x [B, N, q, k] are dropped: of N heads, at q rows and k columns.

    Or of x [q, k], with B = 1 and one head, the first.

    Attributes:
        ids_Bq: int64 ids of the tokens that rows stand for.
        ids_Bk: int64 ids of columns; None: 0 .. k - 1.
        p: drop probability.
        key: int64 scalar that identifies the site and step.
        fused: whether one kernel makes the mask and drops, where there is one.
        first_head: index in the model of the first head.
        all_heads: heads of the model.
        first_column: id of the first column, where `ids_Bk` is None.
        scale: factor of what is not dropped, beside 1 / (1 - p).
    """

    ids_Bq: Tensor
    ids_Bk: Tensor | None
    p: float
    key: Tensor
    fused: bool
    first_head: int = 0
    all_heads: int = 1
    first_column: int = 0
    scale: float = 1.0

    def drop(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Drop elements of `x`, rescale the rest, and add it to `onto`."""
        y: Tensor = _Drop.apply(x, onto, self.ids_Bq, self.ids_Bk, self.key, self)
        return y

    def dropped(self, x: Tensor, onto: Tensor | None) -> Tensor:
        """`drop` without autograd; on a CPU in parts that fit into its cache."""
        if self.fused and runs_triton(x):
            from fivefold.model.kernels import dropout as dropout_kernels

            names = self.ids_Bq, self._named(x), self.key
            numbers = threshold(self.p), self._factor, (self.first_head, self.all_heads)
            return dropout_kernels.drop(x, onto, *names, *numbers)
        rows, columns = self._ids(x)
        if torch.compiler.is_compiling() or uses_gpu_kernels(x) or x.numel() <= AT_A_TIME:
            return self._plainly(rows, columns, x, onto)
        y, (q, k) = torch.empty(x.shape, dtype=x.dtype), x.shape[-2:]
        rows, columns = rows.expand(*x.shape[:-1], 1), columns.expand(*x.shape[:-2], 1, k)
        rows, columns = rows.reshape(-1, q, 1), columns.reshape(-1, 1, k)
        x, found = x.reshape(-1, q, k), y.view(-1, q, k)
        onto = None if onto is None else onto.reshape(-1, q, k)
        step = max(AT_A_TIME // k, 1)
        for matrix, start in product(range(len(x)), range(0, q, step)):
            part = matrix, slice(start, start + step)
            rest = None if onto is None else onto[part]
            found[part] = self._plainly(rows[part], columns[matrix], x[part], rest)
        return y

    @property
    def _factor(self) -> float:
        return self.scale / (1.0 - self.p)

    def _named(self, x: Tensor) -> Tensor | None:
        """Ids of columns for a kernel; None: 0 .. k - 1."""
        if not self.first_column:
            return self.ids_Bk
        return torch.arange(x.shape[-1], device=x.device)[None] + self.first_column

    def _ids(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of rows [.., q, 1] and columns [.., k], each as wide as it differs."""
        columns = torch.arange(x.shape[-1], device=x.device) + self.first_column
        if self.ids_Bk is not None:
            columns = self.ids_Bk[:, None, None]
        if x.dim() == 2:
            return self.ids_Bq[0, :, None], columns
        heads_N1 = torch.arange(x.shape[1], device=x.device)[:, None] + self.first_head
        return (self.ids_Bq[:, None] * self.all_heads + heads_N1)[..., None], columns

    def _plainly(self, rows: Tensor, columns: Tensor, x: Tensor, onto: Tensor | None) -> Tensor:
        kept = drop_mask(rows, columns, self.p, self.key).logical_not_()
        y = (x * kept.to(x.dtype)).mul_(self._factor)
        return result(y if onto is None else y.add_(onto))


class _Drop(torch.autograd.Function):
    """Autograd function that saves no mask: the backward computes it again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        onto: Tensor | None,
        ids_Bq: Tensor,
        ids_Bk: Tensor | None,
        key: Tensor,
        mask: Mask,
    ) -> Tensor:
        ctx.save_for_backward(ids_Bq, ids_Bk, key)
        ctx.rest = (
            mask.p,
            mask.fused,
            mask.first_head,
            mask.all_heads,
            mask.first_column,
            mask.scale,
        )
        return mask.dropped(x, onto)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids_Bq, ids_Bk, key = ctx.saved_tensors
        p, *rest = ctx.rest
        onto = grad if ctx.needs_input_grad[1] else None
        grad_x = Mask(ids_Bq, ids_Bk, p, key, *rest).dropped(grad, None)
        return grad_x, onto, None, None, None, None


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout masks of one microbatch.

    Attributes:
        seed: seed of the run.
        step: optimizer step.
        rows_T: run-wide ids of this rank's tokens in the residual stream.
        all_rows_T: ids of all ranks that split the tokens of the residual stream.
        token_ids_BL: run-wide ids of the L tokens attended to; the queries are the last S.
        fused: whether kernels of a GPU make masks where they drop (`bias_dropout_fusion`), those
            of attention's probabilities within attention.
        run: how many runs of the same layers in the microbatch there were before.
    """

    seed: int
    step: int
    rows_T: Tensor
    all_rows_T: Tensor
    token_ids_BL: Tensor
    fused: bool = False
    run: int = 0

    def at(self, site: str) -> "HiddenDropout":
        """The dropout of the residual stream's features at `site`, a place in the model."""
        return HiddenDropout(self.rows_T, self._key(site), self.fused)

    def of_adapters(
        self, site: str, names: Sequence[str], p: float
    ) -> Mapping[str, "AdapterDropout"]:
        """The dropout of the inputs of a layer's adapters, by the names of its linear layers.

        Args:
            site: the layer.
            names: its linear layers with adapters.
            p: drop probability; 0: there is none.
        """
        rows = self.rows_T, self.all_rows_T
        return {
            name: AdapterDropout(*rows, p, self._key(f"{site}.{name}"), self.fused)
            for name in (names if p else ())
        }

    def uniform(self, features: int, site: str) -> Tensor:
        """Uniform random numbers in [0, 1) for the residual stream, [T, features] fp64."""
        columns_H = torch.arange(features, device=self.rows_T.device)
        mixed = random_bits(self.rows_T[:, None], columns_H, self._key(site))
        return ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53

    def heads(self, p: float, site: str, first_head: int, all_heads: int) -> "HeadDropout":
        """The dropout of attention probabilities for this rank's heads."""
        numbers = first_head, all_heads, self.fused
        return HeadDropout(self.token_ids_BL, p, self._key(site), *numbers)

    def _key(self, site: str) -> Tensor:
        # A tensor, because torch.compile would compile a layer anew for every number; filled on
        # the device, because a copy from the host would wait for it.
        again = f" in run {self.run}" if self.run else ""
        key = derive_seed(self.seed, "dropout", self.step, f"{site}{again}")
        return torch.full((), key, dtype=torch.int64, device=self.rows_T.device)


@dataclass(frozen=True, eq=False)
class HiddenDropout:
    """The dropout of the residual stream at one place and step.

    Attributes:
        rows_T: run-wide ids of this rank's tokens in the residual stream.
        key: int64 scalar that identifies the place and step.
        fused: as in `Dropout`.
    """

    rows_T: Tensor
    key: Tensor
    fused: bool

    def __call__(
        self, x_TH: Tensor, p: float, onto_TH: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Drop features with probability `p`, rescale the rest, and add it to `onto_TH`.

        `scale` is another factor of what is added.
        """
        mask = Mask(self.rows_T[None], None, p, self.key, self.fused, scale=scale)
        return mask.drop(x_TH, onto_TH)


@dataclass(frozen=True, eq=False)
class AdapterDropout:
    """The dropout of one adapter's input.

    Attributes:
        rows_T: run-wide ids of this rank's tokens in the residual stream.
        all_rows_T: ids of all ranks that split the tokens of the residual stream.
        p: drop probability.
        key: int64 scalar that identifies the linear layer and step.
        fused: as in `Dropout`.
    """

    rows_T: Tensor
    all_rows_T: Tensor
    p: float
    key: Tensor
    fused: bool

    def whole(self, x_TH: Tensor) -> Tensor:
        """Dropout of all features of this rank's tokens."""
        return Mask(self.rows_T[None], None, self.p, self.key, self.fused).drop(x_TH)

    def part(self, x_TF: Tensor, first: int) -> Tensor:
        """Dropout of some features, from `first` on, of the tokens of all ranks."""
        rows = self.all_rows_T[None]
        return Mask(rows, None, self.p, self.key, self.fused, first_column=first).drop(x_TF)

    def of_tile(self, start: int, end: int) -> "AdapterDropout":
        """The dropout of this rank's tokens from `start` to `end`, and of the same tokens of other
        ranks."""
        of_ranks = self.all_rows_T.view(-1, len(self.rows_T))
        all_rows_t = of_ranks[:, start:end].flatten()
        return replace(self, rows_T=self.rows_T[start:end], all_rows_T=all_rows_t)


Drops = Mapping[str, AdapterDropout]
"""By the names of linear layers; empty: no adapter has any."""
NO_DROPS: Drops = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class HeadDropout:
    """Dropout of the attention probabilities of one layer and microbatch.

    Attributes:
        token_ids_BL: run-wide ids of the L tokens attended to.
        p: drop probability.
        key: int64 scalar that identifies the layer and step.
        first_head: index in the model of the first query head given.
        all_heads: query heads of the model.
        fused: as in `Dropout`.
    """

    token_ids_BL: Tensor
    p: float
    key: Tensor
    first_head: int
    all_heads: int
    fused: bool

    def between(self, x_BNqk: Tensor, ids_Bq: Tensor, ids_Bk: Tensor) -> Tensor:
        """Drop probabilities between queries and keys with these token ids."""
        heads = self.first_head, self.all_heads
        return Mask(ids_Bq, ids_Bk, self.p, self.key, self.fused, *heads).drop(x_BNqk)

    def after(self, heads: int) -> "HeadDropout":
        """The same dropout, starting `heads` heads later."""
        return replace(self, first_head=self.first_head + heads)


@dataclass(frozen=True, eq=False)
class PairDropout:
    """Dropout of the probabilities between given queries and keys.

    Attributes:
        heads: that of the queries' heads.
        ids_Bq: run-wide ids of the queries.
        ids_Bk: run-wide ids of the keys.
    """

    heads: HeadDropout
    ids_Bq: Tensor
    ids_Bk: Tensor

    def between(self, queries: slice, keys: slice) -> "PairDropout":
        """The same dropout, between some of the queries and some of the keys."""
        return replace(self, ids_Bq=self.ids_Bq[:, queries], ids_Bk=self.ids_Bk[:, keys])

    def __call__(self, p_BNqk: Tensor) -> Tensor:
        """Drop probabilities."""
        return self.heads.between(p_BNqk, self.ids_Bq, self.ids_Bk)


@dataclass(frozen=True, eq=False)
class LayerDropout:
    """All dropout of one layer, created before a compiled layer runs, which cannot compute keys.

    Attributes:
        attended: dropout of what attention adds to the residual stream, or None.
        made: dropout of what the MLP adds, or None.
        heads: dropout of attention probabilities, or None.
        adapters: dropout of what adapters read, by the names of their linear layers.
    """

    attended: HiddenDropout | None = None
    made: HiddenDropout | None = None
    heads: HeadDropout | None = None
    adapters: Drops = field(default_factory=dict)

    def of_tile(self, start: int, end: int) -> "LayerDropout":
        """The same, for adapters that read only this rank's tokens from `start` to `end`."""
        tiles = {name: drop.of_tile(start, end) for name, drop in self.adapters.items()}
        return replace(self, adapters=tiles)
