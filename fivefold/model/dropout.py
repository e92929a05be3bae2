"""Dropout whose mask is a function of what is dropped, not of who drops it, or in which order.

An element's mask bit hashes (seed, step, site, row, column), where the row is a token of the whole
run and the column a feature or a key token: every layout, and a recomputation, drops the same ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.model.seeds import derive_seed


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


# The multipliers of splitmix64 (Steele, Lea, Flood 2014), as the int64 that torch computes in.
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    # torch shifts arithmetically; masking the copies of the sign makes the shift logical
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def hash64(x: Tensor, key: int = 0) -> Tensor:
    """The splitmix64 finaliser of `x` xor `key`, elementwise on int64: a bijection."""
    x = _xor_shift_(x ^ key, 30).mul_(_MULTIPLY_1)
    x = _xor_shift_(x, 27).mul_(_MULTIPLY_2)
    return _xor_shift_(x, 31)


def drop_mask(rows: Tensor, columns: Tensor, p: float, key: int) -> Tensor:
    """True, with probability `p`, where an element is dropped.

    Args:
        rows: int64, broadcast against `columns`.
        columns: int64.
        p: probability in [0, 1).
        key: names the place in the run; other keys give independent masks.
    """
    mixed = hash64(rows, key) ^ hash64(columns)
    mixed = _xor_shift_(mixed.mul_(_MULTIPLY_1), 32).mul_(_MULTIPLY_2)
    return mixed < round(p * 2**64) - 2**63


@dataclass(frozen=True)
class Dropout:
    """The dropout of one microbatch.

    Attributes:
        seed: of the run.
        step: optimizer step.
        rows_T: run-wide ids of the tokens of the residual stream on this rank.
        token_ids_BL: run-wide ids of the tokens that are attended to; the last ones attend.
    """

    seed: int
    step: int
    rows_T: Tensor
    token_ids_BL: Tensor

    def hidden(self, x_TH: Tensor, p: float, site: str) -> Tensor:
        """Drop features of the residual stream; `site` names the place in the model."""
        columns_H = torch.arange(x_TH.shape[1], device=x_TH.device)
        mask_TH = drop_mask(self.rows_T[:, None], columns_H, p, self._key(site))
        return x_TH.masked_fill(mask_TH, 0.0) * (1.0 / (1.0 - p))

    def heads(self, x_BNSL: Tensor, p: float, site: str, heads: range, all_heads: int) -> Tensor:
        """Drop attention probabilities [B, N, query, key] of the given ones of all heads."""
        head_N11 = torch.arange(heads.start, heads.stop, device=x_BNSL.device)[:, None, None]
        ids_BS = self.token_ids_BL[:, -x_BNSL.shape[2] :]
        rows_BNS1 = ids_BS[:, None, :, None] * all_heads + head_N11
        columns_B11L = self.token_ids_BL[:, None, None, :]
        mask_BNSL = drop_mask(rows_BNS1, columns_B11L, p, self._key(site))
        return x_BNSL.masked_fill(mask_BNSL, 0.0) * (1.0 / (1.0 - p))

    def _key(self, site: str) -> int:
        return derive_seed(self.seed, "dropout", self.step, site)
