"""Attention to chosen tokens that reads only the latents of these.

DeepSeek-V2 (2024) absorbs the up-projections of latent attention: a score q W_k c is (q W_k) c, so
that a query of any head reads latents, which all heads share, and the weighted sum of values is W_v
times that of latents. Here each query takes the latents of its chosen tokens; keys and values are
never made. It computes what `sparse` does with a mask, and multiplies less where a row is many
times longer than the number of chosen tokens. A few queries are taken at a time, here and in the
backward, which makes all again. Shapes as in `sparse`; K: chosen tokens, C: features of a latent,
R: of the rotary key behind it, V: of a head's values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.description.pieces import of_chosen
from fivefold.model.attention.sparse import (
    ChoiceSettings,
    IndexScores,
    SomeQueries,
    View,
    divergence,
    scored,
)


@dataclass(frozen=True)
class Read:
    """Inputs of attention.

    Attributes:
        q_BSND: queries, rotary features last.
        latent_BLC: latents, with the rotary key of all heads behind each.
        weight_FC: projects latents up: of each head its unrotated keys, then its values.
        index: queries [B, S, I, D], keys [B, L, D] and weights [B, S, I] of the indexer.
        unrotated: features of a key that are not rotary.
    """

    q_BSND: Tensor
    latent_BLC: Tensor
    weight_FC: Tensor
    index: tuple[Tensor, Tensor, Tensor]
    unrotated: int


def attended(read: Read, rule: ChoiceSettings, view: View, scale: float) -> tuple[Tensor, Tensor]:
    """The output [B, S, N, V], and the log-sum-exp of scores [B, S, N].

    Args:
        read: what it reads.
        rule: how tokens are chosen.
        view: which there are.
        scale: factor of q k^T.
    """
    up, q = _Up(read), read.q_BSND
    out = q.new_empty((*q.shape[:3], up.values.shape[1]))
    lse = q.new_empty(q.shape[:3], dtype=up.keys.dtype)
    for some in _steps(read, up, rule, view, scale):
        scores = some.scores()
        lse[:, some.rows] = scores.logsumexp(-1)
        p = scores.sub_(lse[:, some.rows, :, None]).exp_()
        out[:, some.rows] = up.of_sums(some.summed(p)).to(q.dtype)
    return out, lse


def gradients(
    read: Read,
    rule: ChoiceSettings,
    view: View,
    scale: float,
    saved: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Those of queries, latents and weight, and of the indexer's queries, keys and weights; of
    latents and the indexer's keys in at least fp32.

    Args:
        read: what it reads.
        rule: how tokens are chosen.
        view: which there are.
        scale: factor of q k^T.
        saved: gradient of the output, the output, and the log-sum-exp.
    """
    up, training = _Up(read), rule.training
    sums, (grad, out, lse) = _Sums(read, up, scale), saved
    losses = []
    for some in _steps(read, up, rule, view, scale):
        rows, indexed = some.rows, some.indexed
        p = some.scores().sub_(lse[:, rows, :, None]).exp_()
        if training is not None and indexed is not None:
            logits = some.of_chosen(indexed.scores)
            d_scores, loss = divergence(logits.softmax(-1), p.sum(2) / training.heads, training)
            losses.append(loss)
            sums.add_index(some, indexed.backward_at(d_scores, some.places))
        of = grad[:, rows].to(lse.dtype)
        sums.add_heads(some, p, of, (of * out[:, rows]).sum(-1, keepdim=True))
    if training is not None:
        training.noted.add(torch.stack(losses).sum())
    return sums.gradients()


class _Up:
    """The up-projections, head by head, in at least fp32.

    Attributes:
        keys: [N, D - R, C].
        values: [N, V, C].
    """

    def __init__(self, read: Read) -> None:
        wide = torch.promote_types(read.weight_FC.dtype, torch.float32)
        weight = read.weight_FC.to(wide).unflatten(0, (read.q_BSND.shape[2], -1))
        self.keys, self.values = weight.tensor_split([read.unrotated], dim=1)

    def absorbed(self, q_BqND: Tensor) -> Tensor:
        """Queries of latents, [B, q, N, C + R] (with the up-projection absorbed)."""
        plain, rotated = q_BqND.tensor_split([self.keys.shape[1]], dim=-1)
        return torch.cat((torch.einsum("bqnd,ndc->bqnc", plain, self.keys), rotated), dim=-1)

    def of_absorbed(self, grad: Tensor) -> Tensor:
        """The gradient of queries, given that of `absorbed`."""
        latent, rotated = grad.tensor_split([self.keys.shape[2]], dim=-1)
        return torch.cat((torch.einsum("bqnc,ndc->bqnd", latent, self.keys), rotated), dim=-1)

    def of_sums(self, x_BqNC: Tensor) -> Tensor:
        """Sums of values, [B, q, N, V], from sums of latents."""
        return torch.einsum("bqnc,nvc->bqnv", x_BqNC, self.values)

    def to_sums(self, grad_BqNV: Tensor) -> Tensor:
        """The gradient of sums of latents, given that of sums of values."""
        return torch.einsum("bqnv,nvc->bqnc", grad_BqNV, self.values)


def _steps(
    read: Read, up: _Up, rule: ChoiceSettings, view: View, scale: float
) -> Iterator["_Some"]:
    rows, _, heads, _ = read.q_BSND.shape
    features = read.latent_BLC.shape[-1]

    def numbers(keys: int) -> int:
        return of_chosen(heads, features, rule.heads, rule.topk, keys)

    for queries in view.pieces(rows, numbers):
        yield _Some(read, up, rule, queries, scale)


class _Some:
    """Some queries, their choices, and the latents of their chosen tokens.

    Attributes:
        rows, keys: where the queries are, and the tokens that they chose among.
        indexed: scores of the indexer; None: all tokens are chosen.
        places: places of the chosen tokens among these, [B, q, K].
        q: queries, [B, q, N, D].
        absorbed: the same of latents, times the factor of scores, [B, q, N, C + R].
        latents: [B, q, K, C + R].
    """

    def __init__(
        self, read: Read, up: _Up, rule: ChoiceSettings, queries: SomeQueries, scale: float
    ) -> None:
        self.rows, self.keys, self._latent = queries.rows, queries.keys, up.keys.shape[2]
        wide, count = up.keys.dtype, min(rule.topk, queries.count)
        chosen = queries.seen(read.q_BSND.device)
        self.indexed: IndexScores | None = None
        if rule.training is not None or rule.asks(queries.count):
            self.indexed = scored(read.index, rule, queries, chosen)
            chosen = chosen & rule.chosen(self.indexed.scores, queries)
        self.places, self._there = places(chosen.expand(len(read.q_BSND), -1, -1), count)
        self.q = read.q_BSND[:, self.rows].to(wide)
        self.absorbed = up.absorbed(self.q) * scale
        self.latents = taken(read.latent_BLC[:, self.keys], self.places).to(wide)

    def scores(self) -> Tensor:
        """[B, q, N, K] scores; minus infinity where no token is chosen."""
        scores = self.absorbed @ self.latents.transpose(2, 3)
        return scores.masked_fill_(~self._there[:, :, None], float("-inf"))

    def summed(self, p_BqNK: Tensor) -> Tensor:
        """Latents times their probabilities, [B, q, N, C]."""
        return p_BqNK @ self.latents[..., : self._latent]

    def of_chosen(self, scores_BqL: Tensor) -> Tensor:
        """The indexer's scores of chosen tokens, [B, q, K]."""
        return scores_BqL.gather(-1, self.places).masked_fill_(~self._there, float("-inf"))


class _Sums:
    """Accumulated gradients."""

    def __init__(self, read: Read, up: _Up, scale: float) -> None:
        self._read, self._up, self._scale, wide = read, up, scale, up.keys.dtype
        q, keys, w = read.index
        self._dq = torch.empty_like(read.q_BSND)
        self._of_latents = torch.zeros_like(read.latent_BLC, dtype=wide)
        self._of_keys, self._of_values = torch.zeros_like(up.keys), torch.zeros_like(up.values)
        self._of_index = (
            torch.zeros_like(q),
            torch.zeros_like(keys, dtype=wide),
            torch.zeros_like(w),
        )

    def add_heads(self, some: _Some, p: Tensor, grad: Tensor, delta: Tensor) -> None:
        """Add gradients from attention.

        Args:
            some: the queries.
            p: their probabilities, [B, q, N, K].
            grad: gradient of the output, [B, q, N, V].
            delta: its products with the output, [B, q, N, 1].
        """
        up, latent = self._up, self._up.keys.shape[2]
        self._of_values += torch.einsum("bqnv,bqnc->nvc", grad, some.summed(p))
        to_sums = up.to_sums(grad)
        ds = (to_sums @ some.latents[..., :latent].transpose(2, 3)).sub_(delta).mul_(p)
        of_latents = ds.transpose(2, 3) @ some.absorbed
        of_latents[..., :latent] += p.transpose(2, 3) @ to_sums
        put(self._of_latents, some.keys, some.places, of_latents)
        of_absorbed = ds @ some.latents * self._scale
        plain = some.q[..., : self._read.unrotated]
        self._of_keys += torch.einsum("bqnd,bqnc->ndc", plain, of_absorbed[..., :latent])
        self._dq[:, some.rows] = up.of_absorbed(of_absorbed).to(self._dq.dtype)

    def add_index(self, some: _Some, grads: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add gradients of the indexer's queries, its keys of chosen tokens, and its weights."""
        of_q, of_keys, of_w = self._of_index
        dq, dk, dw = grads
        of_q[:, some.rows], of_w[:, some.rows] = dq.to(of_q.dtype), dw.to(of_w.dtype)
        put(of_keys, some.keys, some.places, dk)

    def gradients(self) -> tuple[Tensor, ...]:
        """All gradients, in the order of `gradients`."""
        weight = torch.cat((self._of_keys, self._of_values), dim=1).flatten(0, 1)
        weight = weight.to(self._read.weight_FC.dtype)
        return self._dq, self._of_latents, weight, *self._of_index


def places(chosen_BqL: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of each query's chosen tokens in ascending order, and which of the `count` exist.

    Found by counting, so that the host need not know how many.

    Returns:
        Their places [B, q, count], 0 behind the last; whether there is one, bool.
    """
    order = chosen_BqL.cumsum(-1)
    slots = torch.where(chosen_BqL, order - 1, count)
    of = torch.arange(chosen_BqL.shape[-1], device=slots.device).expand(slots.shape)
    found = slots.new_zeros((*slots.shape[:-1], count + 1)).scatter_(-1, slots, of)
    there = torch.arange(count, device=slots.device) < order[..., -1:]
    return found[..., :count].masked_fill(~there, 0), there


def taken(x_BLF: Tensor, places_BqK: Tensor) -> Tensor:
    """[B, q, K, F]."""
    rows = torch.arange(len(x_BLF), device=x_BLF.device)[:, None, None]
    return x_BLF[rows, places_BqK]


def put(total_BLF: Tensor, keys: slice, places_BqK: Tensor, grad_BqKF: Tensor) -> None:
    """Add gradients of what `taken` read from the tokens `keys`."""
    rows = torch.arange(len(total_BLF), device=total_BLF.device)[:, None, None]
    total_BLF.index_put_((rows, places_BqK + keys.start), grad_BqKF, accumulate=True)
