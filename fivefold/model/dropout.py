"""Dropout with masks that are a function of the element, so that every layout drops the same.

An element's mask bit hashes (seed, step, site, row, column). The row is a token's index in the
whole run and the column a feature or a key token, so recomputation also drops the same elements.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.model.seeds import derive_seed


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


# The multipliers of splitmix64 (Steele, Lea, Flood 2014), as the int64 that torch computes in.
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    # torch shifts arithmetically; masking the sign bits makes the shift logical
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def hash64(x: Tensor, key: int | Tensor = 0) -> Tensor:
    """The splitmix64 finaliser of `x` xor `key`, elementwise on int64: a bijection."""
    x = _xor_shift_(x ^ key, 30).mul_(_MULTIPLY_1)
    x = _xor_shift_(x, 27).mul_(_MULTIPLY_2)
    return _xor_shift_(x, 31)


def drop_mask(rows: Tensor, columns: Tensor, p: float, key: int | Tensor) -> Tensor:
    """True, with probability `p`, where an element is dropped.

    Args:
        rows: int64, broadcast against `columns`.
        columns: int64.
        p: probability in [0, 1).
        key: int64 scalar that identifies the site and step; different keys give independent masks.
    """
    mixed = hash64(rows, key) ^ hash64(columns)
    mixed = _xor_shift_(mixed.mul_(_MULTIPLY_1), 32).mul_(_MULTIPLY_2)
    return mixed < round(p * 2**64) - 2**63


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout masks of one microbatch.

    Attributes:
        seed: seed of the run.
        step: optimizer step.
        rows_T: run-wide ids of this rank's tokens in the residual stream.
        token_ids_BL: run-wide ids of the L tokens attended to; the queries are the last S.
    """

    seed: int
    step: int
    rows_T: Tensor
    token_ids_BL: Tensor

    def at(self, site: str) -> "HiddenDropout":
        """The dropout of the residual stream's features at `site`, a place in the model."""
        return HiddenDropout(self.rows_T, self._key(site))

    def uniform(self, features: int, site: str) -> Tensor:
        """Uniform random numbers in [0, 1) for the residual stream, [T, features] fp64."""
        columns_H = torch.arange(features, device=self.rows_T.device)
        mixed = hash64(self.rows_T[:, None], self._key(site)) ^ hash64(columns_H)
        mixed = _xor_shift_(mixed.mul_(_MULTIPLY_1), 32).mul_(_MULTIPLY_2)
        return ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53

    def heads(self, p: float, site: str, first_head: int, all_heads: int) -> "HeadDropout":
        """The dropout of attention probabilities for this rank's heads."""
        return HeadDropout(self.token_ids_BL, p, self._key(site), first_head, all_heads)

    def _key(self, site: str) -> Tensor:
        # A tensor, because torch.compile would compile a layer anew for every number; filled on
        # the device, because a copy from the host would wait for it.
        key = derive_seed(self.seed, "dropout", self.step, site)
        return torch.full((), key, dtype=torch.int64, device=self.rows_T.device)


@dataclass(frozen=True, eq=False)
class HiddenDropout:
    """The dropout of the residual stream at one place and step.

    Attributes:
        rows_T: run-wide ids of this rank's tokens in the residual stream.
        key: int64 scalar that identifies the place and step.
    """

    rows_T: Tensor
    key: Tensor

    def __call__(self, x_TH: Tensor, p: float) -> Tensor:
        """Drop features with probability `p`, and rescale the rest."""
        columns_H = torch.arange(x_TH.shape[1], device=x_TH.device)
        mask_TH = drop_mask(self.rows_T[:, None], columns_H, p, self.key)
        return x_TH.masked_fill(mask_TH, 0.0) * (1.0 / (1.0 - p))


@dataclass(frozen=True, eq=False)
class HeadDropout:
    """Dropout of the attention probabilities of one layer and microbatch.

    Attributes:
        token_ids_BL: run-wide ids of the L tokens attended to.
        p: drop probability.
        key: int64 scalar that identifies the layer and step.
        first_head: index in the model of the first query head given.
        all_heads: query heads of the model.
    """

    token_ids_BL: Tensor
    p: float
    key: Tensor
    first_head: int
    all_heads: int

    def __call__(self, x_BNSL: Tensor) -> Tensor:
        """Drop probabilities of the last S of L tokens."""
        return self.between(x_BNSL, self.token_ids_BL[:, -x_BNSL.shape[2] :], self.token_ids_BL)

    def between(self, x_BNqk: Tensor, ids_Bq: Tensor, ids_Bk: Tensor) -> Tensor:
        """Drop probabilities between queries and keys with these token ids."""
        last_head = self.first_head + x_BNqk.shape[1]
        heads_N11 = torch.arange(self.first_head, last_head, device=x_BNqk.device)[:, None, None]
        rows_BNq1 = ids_Bq[:, None, :, None] * self.all_heads + heads_N11
        mask_BNqk = drop_mask(rows_BNq1, ids_Bk[:, None, None, :], self.p, self.key)
        return x_BNqk.masked_fill(mask_BNqk, 0.0) * (1.0 / (1.0 - self.p))

    def after(self, heads: int) -> "HeadDropout":
        """The same dropout, starting `heads` heads later."""
        return replace(self, first_head=self.first_head + heads)


@dataclass(frozen=True, eq=False)
class LayerDropout:
    """All dropout of one layer, made before a compiled layer runs: it knows no names of places.

    Attributes:
        attended: of what attention adds to the residual stream; None: no dropout.
        made: of what the MLP adds; None: no dropout.
        heads: of attention probabilities; None: no dropout.
    """

    attended: HiddenDropout | None = None
    made: HiddenDropout | None = None
    heads: HeadDropout | None = None
