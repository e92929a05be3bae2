"""Causal self-attention with grouped key/value heads.

Shapes: B batch, S sequence, N query heads, G key/value heads, D head features, T = B * S. Head
counts are those of this rank, read from tensors rather than from the configuration. There may be
L >= S keys and values, with the queries at the last S positions: a sequence slice attends to the
slices before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.mesh.device import uses_gpu_kernels
from fivefold.model.attention.blocks import DocumentMask, flash_takes
from fivefold.model.attention.blockwise import local_attention
from fivefold.model.attention.cuda_kernels import runs_own
from fivefold.model.attention.output_gate import gated_output, split_gate
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.attention.sparse import Index, sparse_attention
from fivefold.model.attention.varlen import (
    PackedFlash,
    PackedKernel,
    PackedOwn,
    Pieces,
    lacking_packed,
    packed_attention,
)
from fivefold.model.batch import Documents
from fivefold.model.caps import clamped
from fivefold.model.context import Context
from fivefold.model.dropout import Dropout, HeadDropout
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.leaves import local
from fivefold.model.norms import RMSNorm, rms_norm_of, unit_norm
from fivefold.model.shards import MicrobatchShare


@dataclass(frozen=True)
class Scope:
    """Which keys each query attends to: none after itself.

    Attributes:
        documents: documents of the L keys, or the chunks of documents within which a layer attends;
            None if every row is one of them.
        window: how many tokens before itself a query attends to; None: all.
        part: the tokens this rank holds, if rows are split over ranks; None if it holds all.
        sinks: [N], one logit per query head that joins the softmax but has no value, like one more
            key that every query attends to; None: no sinks.
        scores: how scores are made of q k^T.
        index: chooses some of these keys; None: queries attend to all.
    """

    documents: Documents | None = None
    window: int | None = None
    part: MicrobatchShare | None = None
    sinks: Tensor | None = None
    scores: Scores = USUAL
    index: Index | None = None


class Kernel(Protocol):
    """softmax(scores of q k^T) v within each document."""

    def __call__(
        self,
        q_BSND: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        scope: Scope,
        drop: HeadDropout | None,
        /,
    ) -> Tensor:
        """Attention output [B, S, N, D]; groups of query heads may share a key/value head."""


def attention(
    q_BSND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, scope: Scope, drop: HeadDropout | None
) -> Tensor:
    """Attention by the cheapest implementation that supports the request.

    With documents, a window, sinks, dropout, a cap, scores to note, or values of another size than
    keys: one call of FlashAttention where it runs, our own for dropout and scores. Elsewhere, and
    for a sequence slice with earlier keys: block by block, which skips blocks that nothing sees, or
    document by document. Otherwise PyTorch's fused attention. Where an index chooses keys, our own.
    """
    if scope.index is not None:
        scale = scope.scores.factor(q_BSND.shape[3])
        return sparse_attention(q_BSND, k_BLGD, v_BLGD, scope.index, scope.documents, scale)
    sliced, special = k_BLGD.shape[1] > q_BSND.shape[1], _special(q_BSND, k_BLGD, v_BLGD, scope)
    packed = None if sliced else _packed_kernel(q_BSND, v_BLGD, scope, drop, special)
    if packed is not None:
        pieces = _pieces(q_BSND, scope)
        return packed_attention(q_BSND, k_BLGD, v_BLGD, pieces, packed, scope.sinks)
    if sliced or special or drop is not None:
        starts = (0, k_BLGD.shape[1]) if scope.documents is None else scope.documents.starts
        mask = DocumentMask(starts, scope.window)
        return local_attention(q_BSND, k_BLGD, v_BLGD, mask, scope.sinks, drop, scope.scores)
    return sdpa_attention(q_BSND, k_BLGD, v_BLGD, scope)


def in_one_call(
    q_BSND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, scope: Scope, drop: HeadDropout | None
) -> bool:
    """Whether `attention` is one fused operation here, whatever the documents."""
    ours = drop is not None or not scope.scores.by_any_kernel or scope.index is not None
    if ours or k_BLGD.shape[1] > q_BSND.shape[1]:
        return False
    special = _special(q_BSND, k_BLGD, v_BLGD, scope)
    plain = scope.documents is None and not special
    return plain or _packed_kernel(q_BSND, v_BLGD, scope, drop, special) is not None


def _special(q_BSND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, scope: Scope) -> bool:
    """Whether the request has features that PyTorch's fused attention lacks, apart from
    documents."""
    limited = scope.window is not None and scope.window + 1 < k_BLGD.shape[1]
    ours = not scope.scores.by_any_kernel
    return limited or ours or scope.sinks is not None or v_BLGD.shape[3] != q_BSND.shape[3]


def _packed_kernel(
    q_BSND: Tensor, v_BSGD: Tensor, scope: Scope, drop: HeadDropout | None, special: bool
) -> PackedKernel | None:
    """The kernel that handles the documents of whole rows, and all other features, in one call.

    None: nothing does, or PyTorch's fused attention does. `special`: as by `_special`.
    """
    if drop is not None or not scope.scores.by_any_kernel:
        return PackedOwn(drop, scope.scores) if runs_own(q_BSND, v_BSGD, drop) else None
    asked, scale = special or scope.documents is not None, scope.scores.scale
    return PackedFlash(scale) if asked and not lacking_packed(q_BSND, v_BSGD) else None


def _pieces(q_BSND: Tensor, scope: Scope) -> Pieces:
    if scope.documents is not None:
        documents = scope.documents
        return Pieces(documents.starts_C, documents.longest, scope.window)
    rows, length = q_BSND.shape[:2]
    ends = torch.arange(rows + 1, dtype=torch.int32, device=q_BSND.device) * length
    return Pieces(ends, length, scope.window)


def sdpa_attention(q_BSND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, scope: Scope) -> Tensor:
    """PyTorch's fused attention, one document at a time so that no masked score is computed.

    The caller guarantees as many keys as queries, no cap, and that no window excludes a key.
    """
    documents, scale = scope.documents, scope.scores.scale
    if documents is None:
        return _fused(q_BSND, k_BLGD, v_BLGD, scale)
    # split() rather than slicing: its backward concatenates gradients instead of padding and adding
    pieces = (x.flatten(0, 1).split(documents.lengths) for x in (q_BSND, k_BLGD, v_BLGD))
    each = zip(*pieces, strict=True)
    outputs = [_fused(q[None], k[None], v[None], scale)[0] for q, k, v in each]
    return torch.cat(outputs).view(*q_BSND.shape[:3], -1)


def _fused(q_BSND: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, scale: float | None) -> Tensor:
    q, k, v = q_BSND.transpose(1, 2), k_BLGD.transpose(1, 2), v_BLGD.transpose(1, 2)
    shared = q.shape[1] != k.shape[1]
    flash = q.dtype in (torch.bfloat16, torch.float16) and flash_takes(q.shape[3])
    if shared and uses_gpu_kernels(q) and not flash:
        # On CUDA, only FlashAttention knows shared heads; else all S x S scores would be held.
        k, v = (_per_query_head(x, q.shape[1]) for x in (k_BLGD, v_BLGD))
        shared = False
    out_BNSD = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=shared
    )
    return out_BNSD.transpose(1, 2)


def _per_query_head(x_BSGD: Tensor, num_query_heads: int) -> Tensor:
    """[B, S, G, D] -> [B, N, S, D]: each key/value head repeated for its query heads."""
    x_BGSD = x_BSGD.transpose(1, 2)
    repeats = num_query_heads // x_BGSD.shape[1]
    return x_BGSD if repeats == 1 else x_BGSD.repeat_interleave(repeats, dim=1)


Up = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Latents [B, L, C] -> keys [B, L, N, Dk] and values [B, L, N, Dv]."""


class LatentKernel(Protocol):
    """Attention that computes keys and values from latents on the rank that needs them."""

    def __call__(
        self,
        q_BSND: Tensor,
        latent_BSC: Tensor,
        up: Up,
        parameters: tuple[Tensor, ...],
        scope: Scope,
        drop: HeadDropout | None,
        /,
    ) -> Tensor:
        """[B, S, N, Dv] from queries and the latents of the same tokens.

        `up` projects latents to keys and values with `parameters`.
        """


class Sinks(nn.Module):
    """One learned logit per query head that joins its softmax but has no value."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class AttentionBlock(LayerBlock):
    """Common base of all attention modules.

    Attributes:
        kernel: seam around softmax(q k^T) v.
        latent_kernel: attention that takes latents, used instead of `kernel`; None: keys and
            values are projected first.
        has_latents: whether the module supports a `latent_kernel`.
        layer: index of the layer in the model.
        reach: how far back queries attend.
        scores: how scores are made of q k^T.
        rotates: whether RoPE turns queries and keys.
        tempers: whether queries are multiplied by factors of their positions.
        local: whether it is attention that layers with a window have of their own.
        head_offset: index of this rank's first query head in the model; keys dropout masks.
    """

    recomputed_with_norm = "a2a_overlap_attn"
    has_latents = False

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model.as_in(layer), layer
        self.reach = model.reach_of(layer)
        self.scores = Scores(model.softmax_scale, model.attn_logit_softcapping)
        self.rotates, self.local = model.rotates(layer), model.is_local(layer)
        self.tempers = model.tempers(layer)
        self.site = f"layers.{layer}.self_attn.probabilities"
        self.kernel: Kernel = attention
        self.latent_kernel: LatentKernel | None = None
        learned = self.model.softmax_type == "learnable"
        self.sinks = Sinks(model.num_attention_heads) if learned else None
        self.head_offset = 0

    def wrap_kernel(self, wrap: Callable[[Any], Any]) -> None:
        """Wrap the kernel in use, for example to exclude it from compilation."""
        if self.latent_kernel is not None:
            self.latent_kernel = wrap(self.latent_kernel)
        self.kernel = wrap(self.kernel)

    def split(self, rank: int, ranks: int) -> None:
        """Take this rank's query heads."""
        self.head_offset = rank * self.model.num_attention_heads // ranks

    def _scope(self, context: Context) -> Scope:
        part = context.part
        sinks = None if self.sinks is None else local(self.sinks.weight)
        share = None if part is None else part.seeing(self.reach)
        documents = context.packing if self.reach.chunk is None else context.chunks
        return Scope(documents, self.reach.window, share, sinks, self.scores)

    def clipped(self, share_N: Tensor, alpha: float) -> dict[str, Tensor]:
        """QK-clip: factors for rows of whole weights by linear layer, so that logits shrink to a
        share.

        As in Megatron-LM, queries' weights get a power of the share, keys' weights the rest.

        Args:
            share_N: what each query head of the model is to keep of its logits.
            alpha: the power of it that the weights of queries get.
        """
        raise NotImplementedError

    def _tempered(self, q_BSND: Tensor, context: Context) -> Tensor:
        """Queries, multiplied by factors of their positions if the layer has any."""
        if not self.tempers or context.temperature is None:
            return q_BSND
        return (q_BSND * context.temperature).to(q_BSND.dtype)

    def head_dropout(self, dropout: Dropout) -> HeadDropout | None:
        """Dropout of this rank's attention probabilities; None: the model has none."""
        p, all_heads = self.model.attention_dropout, self.model.num_attention_heads
        return dropout.heads(p, self.site, self.head_offset, all_heads) if p else None


NormTogether = Callable[[RMSNorm, RMSNorm, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Normalises all query heads of each token together, and all key heads: [T, F] each."""


def plain_together(
    q_norm: RMSNorm, k_norm: RMSNorm, q_TF: Tensor, k_TF: Tensor
) -> tuple[Tensor, Tensor]:
    """Both norms; replaced if ranks split the heads."""
    return q_norm(q_TF), k_norm(k_TF)


class Attention(AttentionBlock):
    """Projections, optional q/k norms, RoPE, the kernel, and the output projection.

    Attributes:
        norm_together: seam around the norms of queries and keys, if heads are normalised together.
    """

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__(model, layer)
        model = self.model
        hidden, bias = model.hidden_size, model.qkv_bias
        self.q_proj = Linear(hidden, model.query_outputs, bias)
        self.k_proj = Linear(hidden, model.k_size, bias)
        self.v_proj = None if model.keys_as_values else Linear(hidden, model.v_size, bias)
        self.o_proj = Linear(model.attention_size, hidden, model.output_bias)
        sizes = (model.q_size, model.k_size) if model.norms_together else (model.head_dim,) * 2
        norms = [rms_norm_of(model, size) if model.qk_layernorm else None for size in sizes]
        self.q_norm, self.k_norm = norms
        self.norm_together: NormTogether = plain_together
        self.gated = model.attention_output_gate

    def split(self, rank: int, ranks: int) -> None:
        """Take this rank's query heads and the key/value heads they attend with."""
        super().split(rank, ranks)
        if self.model.num_kv_heads % ranks:
            # Fewer key/value heads than ranks: each rank holds all of them and uses one.
            head = rank * self.model.num_kv_heads // ranks
            sizes = self.model.query_dim, self.model.value_dim
            for linear, D in zip((self.k_proj, self.v_proj), sizes, strict=True):
                if linear is not None:
                    linear.use(slice(head * D, (head + 1) * D))

    def clipped(self, share_N: Tensor, alpha: float) -> dict[str, Tensor]:
        """See `AttentionBlock`; heads that share a key use the smallest share among them."""
        D, each = self.model.query_dim, self.model.query_outputs // self.model.num_attention_heads
        share_Gn = share_N.view(self.model.num_kv_heads, -1)
        least_G = share_Gn.amin(1)
        query_N1 = least_G[:, None].expand_as(share_Gn).reshape(-1, 1) ** alpha
        rows_NR = torch.cat((query_N1.expand(-1, D), torch.ones(len(share_N), each - D)), dim=1)
        keys_R = (least_G ** (1 - alpha)).repeat_interleave(D)
        return {"q_proj": rows_NR.flatten(), "k_proj": keys_R}

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]; attends within the rows and documents of `context`."""
        drops, v_proj = context.layer.adapters, self.v_proj
        linears = self.q_proj, self.k_proj, *(() if v_proj is None else (v_proj,))
        projected = self.project(x_TH, *linears, drops=drops)
        if v_proj is None:
            projected = *projected, projected[1]
        D, q_norm, k_norm, gate_TF = self.model.head_dim, self.q_norm, self.k_norm, None
        if self.gated:
            queries, gate_TF = split_gate(projected[0], D)
            projected = queries, *projected[1:]
        if q_norm is not None and k_norm is not None and self.model.norms_together:
            queries, keys, values = projected
            projected = *self.norm_together(q_norm, k_norm, queries, keys), values
        if (most := self.model.clip_qkv) is not None:
            projected = tuple(clamped(x, most) for x in projected)
        dims = D, D, self.model.value_dim
        q, k, v = (
            x.view(context.rows, x.shape[0] // context.rows, -1, dim)
            for x, dim in zip(projected, dims, strict=True)
        )
        after = self.model.qk_layernorm_after_rope
        if not after:
            q, k = self._normed_each(q, k)
        if self.rotates:
            q, k = context.rotary[self.local].rotate_both(q, k)
            if self.model.qk_l2_norm:
                q, k = (unit_norm(x, self.model.norm_epsilon) for x in (q, k))
        q = self._tempered(q, context)
        if after:
            q, k = self._normed_each(q, k)
        if self.model.v_l2_norm:
            v = unit_norm(v, self.model.norm_epsilon)
        if self.model.value_multiplier != 1.0:
            v = v * self.model.value_multiplier
        if context.sequence is not None:
            k, v = context.sequence.join(self.site, k, v)
        out_BSND = self.kernel(q, k, v, self._scope(context), context.layer.heads)
        out_TF = out_BSND.reshape(len(projected[0]), -1)
        if gate_TF is not None:
            out_TF = gated_output(out_TF, gate_TF)
        return self.project_back(out_TF, self.o_proj, drops)

    def _normed_each(self, q_BSND: Tensor, k_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Heads, each normalised by itself if the model does so."""
        if self.q_norm is None or self.k_norm is None or self.model.norms_together:
            return q_BSND, k_BSGD
        return self.q_norm(q_BSND), self.k_norm(k_BSGD)
