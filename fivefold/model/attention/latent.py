"""Multi-head latent attention (MLA): keys and values of all heads come from one small latent.

DeepSeek-V2 (2024): the hidden state is projected down to one latent for queries and one for keys
and values; each is normalised and projected up to the heads. Separate rotary features carry the
positions; all heads share one rotary key. Shapes: T tokens, B rows, S tokens of a row, N heads of
this rank, Q and C features of the latents, R rotary features, D and V features of a head's queries
and values.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.model.attention.grouped_query import AttentionBlock, Scope
from fivefold.model.attention.indexer import Indexer
from fivefold.model.context import Context
from fivefold.model.dropout import Drops, HeadDropout
from fivefold.model.layers import Linear
from fivefold.model.leaves import local
from fivefold.model.norms import LayerNorm, RMSNorm, latent_norm
from fivefold.model.rope import score_scale

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [B, S, N, D], keys [B, S, N, D] and values [B, S, N, V]."""


def plain_up(make: Callable[[], Heads], attend: Callable[..., Tensor]) -> Tensor:
    """Project latents up, then attend; replaced when queries, keys and values are recomputed."""
    return attend(*make())


class LatentAttention(AttentionBlock):
    """Down- and up-projections, decoupled RoPE, attention kernel and output projection.

    Attributes:
        up: seam around the up-projections and the kernel.
    """

    has_latents = True
    q_proj: Linear | None
    q_a_proj: Linear | None
    q_a_layernorm: LayerNorm | RMSNorm | None
    q_b_proj: Linear | None

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__(model, layer)
        hidden, bias = model.hidden_size, model.add_bias_linear
        rank, compressed = model.kv_lora_rank, model.q_lora_rank
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if compressed is None:
            self.q_proj = Linear(hidden, model.q_size, bias)
        else:
            self.q_a_proj = Linear(hidden, compressed, bias)
            self.q_a_layernorm = latent_norm(model, compressed)
            self.q_b_proj = Linear(compressed, model.q_size, bias)
        self.kv_a_proj = Linear(hidden, rank + model.qk_pos_emb_head_dim, bias)
        self.kv_a_layernorm = latent_norm(model, rank)
        unrotated = model.num_attention_heads * model.qk_head_dim
        self.kv_b_proj = Linear(rank, unrotated + model.v_size, bias)
        self.o_proj = Linear(model.attention_size, hidden, bias)
        self.indexer = Indexer(model, layer) if model.is_sparse else None
        self.up = plain_up
        if (more := score_scale(model)) != 1.0:
            scale = more * self.scores.factor(model.query_dim)
            self.scores = replace(self.scores, scale=scale)

    def clipped(self, share_N: Tensor, alpha: float) -> dict[str, Tensor]:
        """See `AttentionBlock`; the rotary key, which heads share, stays as it is."""
        model, share_N1 = self.model, share_N[:, None]
        sizes = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
        plain, rotary, value = (torch.ones(1, size).double() for size in sizes)
        queries_NR = torch.cat((share_N1**alpha * plain, share_N1 * rotary), dim=1)
        pairs_NR = torch.cat((share_N1 ** (1 - alpha) * plain, value.expand(len(share_N), -1)), 1)
        query = "q_proj" if self.q_b_proj is None else "q_b_proj"
        return {query: queries_NR.flatten(), "kv_b_proj": pairs_NR.flatten()}

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]; attends within the rows and documents of `context`."""
        scope, drop, drops = self._scope(context), context.layer.heads, context.layer.adapters
        latents = self._down(x_TH, drops)
        if self.indexer is not None:
            scope = replace(scope, index=self.indexer(x_TH, latents[0], context))
        if self.latent_kernel is None or context.sequence is not None:
            make = partial(self._heads, *latents, context)
            out_BSNV = self.up(make, lambda q, k, v: self.kernel(q, k, v, scope, drop))
        else:
            out_BSNV = self._from_latents(*latents, context, scope, drop)
        return self.project_back(out_BSNV.flatten(2).flatten(0, 1), self.o_proj, drops)

    def _down(self, x_TH: Tensor, drops: Drops) -> tuple[Tensor, Tensor, Tensor]:
        """Input of the query projection, normalised key/value latent, and shared rotary key.

        The last two are copies, so that neither keeps the other's memory alive.
        """
        if self.q_a_proj is None or self.q_a_layernorm is None:
            query, (kv_TC,) = x_TH, self.project_whole(x_TH, self.kv_a_proj, drops=drops)
        else:
            downs = self.q_a_proj, self.kv_a_proj
            query_TQ, kv_TC = self.project_whole(x_TH, *downs, drops=drops)
            query = self.q_a_layernorm(query_TQ)
        latent_TC, key_TR = (part.contiguous() for part in kv_TC.split(self._sizes, dim=-1))
        return query, self.kv_a_layernorm(latent_TC), key_TR

    @property
    def _sizes(self) -> list[int]:
        """Sizes C (key/value latent) and R (rotary key)."""
        return [self.model.kv_lora_rank, self.model.qk_pos_emb_head_dim]

    def _heads(self, query: Tensor, latent_TC: Tensor, key_TR: Tensor, context: Context) -> Heads:
        q_BSND = self._queries(query, context)
        (kv_TF,) = self.project(latent_TC, self.kv_b_proj, drops=context.layer.adapters)
        key_BS1R = self._shared_key(key_TR, context)
        k, v = _Joined.apply(context.by_rows(kv_TF, q_BSND.shape[2]), key_BS1R, self.model)
        if context.sequence is not None:
            k, v = context.sequence.join(self.site, k, v)
        return q_BSND, k, v

    def _queries(self, query: Tensor, context: Context) -> Tensor:
        linear = self.q_proj if self.q_b_proj is None else self.q_b_proj
        assert linear is not None
        (q_TF,) = self.project(query, linear, drops=context.layer.adapters)
        heads = q_TF.shape[1] // self.model.query_dim
        q_BSND = context.by_rows(q_TF, heads)
        if self.rotates:
            q_BSND = context.rotary[self.local].rotate(q_BSND, self.model.qk_head_dim)
        return self._tempered(q_BSND, context)

    def _shared_key(self, key_TR: Tensor, context: Context) -> Tensor:
        key_BS1R = context.by_rows(self.spread(key_TR), 1)
        return context.rotary[self.local].rotate(key_BS1R) if self.rotates else key_BS1R

    def _from_latents(
        self,
        query: Tensor,
        latent_TC: Tensor,
        key_TR: Tensor,
        context: Context,
        scope: Scope,
        drop: HeadDropout | None,
    ) -> Tensor:
        assert self.latent_kernel is not None
        q_BSND = self._queries(query, context)
        heads = q_BSND.shape[2]
        key_BSR = self._shared_key(key_TR, context)[:, :, 0]
        latent_BSC = context.by_rows(self.spread(latent_TC), 1)[:, :, 0]
        linear, sizes = self.kv_b_proj, self._sizes
        weight = local(linear.weight)
        bias = None if linear.bias is None else local(linear.bias)

        def up(both_BLC: Tensor) -> tuple[Tensor, Tensor]:
            latent, key = both_BLC.split(sizes, dim=-1)
            made = F.linear(latent, weight, bias).unflatten(-1, (heads, -1))
            k, v = _Joined.apply(made, key[:, :, None], self.model)
            return k, v

        parameters = (weight,) if bias is None else (weight, bias)
        both = torch.cat((latent_BSC, key_BSR), dim=-1)
        return self.latent_kernel(q_BSND, both, up, parameters, scope, drop)


class _Joined(torch.autograd.Function):
    """Contiguous keys and values, from the up-projection and the shared rotary key.

    Saves nothing for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, kv_BSNF: Tensor, key_BS1R: Tensor, model: ModelConfig
    ) -> tuple[Tensor, Tensor]:
        ctx.unrotated = model.qk_head_dim
        unrotated, v = kv_BSNF.split([model.qk_head_dim, model.v_head_dim], dim=-1)
        shared = key_BS1R.expand(*unrotated.shape[:3], -1)
        return torch.cat((unrotated, shared), dim=-1), v.contiguous()

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        unrotated, rotary = dk.tensor_split([ctx.unrotated], dim=-1)
        return torch.cat((unrotated, dv), dim=-1), rotary.sum(2, keepdim=True), None
