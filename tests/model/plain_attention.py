"""Attention by its definition, which every kernel must equal."""

import torch
from torch import Tensor

from fivefold.model.attention.grouped_query import Scope
from fivefold.model.batch import Documents
from fivefold.model.dropout import HeadDropout


def plain_attention(
    q_BSND: Tensor,
    k_BLGD: Tensor,
    v_BLGD: Tensor,
    scope: Scope,
    drop: HeadDropout | None = None,
) -> Tensor:
    """Attention by its definition: holds the S x L scores, softmax in at least fp32."""
    S, N, D = q_BSND.shape[1:]
    q_BNSD, k_BNLD, v_BNLD = (
        x.transpose(1, 2).repeat_interleave(N // x.shape[2], dim=1)
        for x in (q_BSND, k_BLGD, v_BLGD)
    )
    scale = D**-0.5 if scope.scores.scale is None else scope.scores.scale
    scores = (q_BNSD * scale) @ k_BNLD.transpose(2, 3)
    if scope.scores.cap is not None:
        scores = scope.scores.cap * (scores / scope.scores.cap).tanh()
    scores = scores.masked_fill(~_seen(S, k_BLGD, scope), float("-inf"))
    if scope.sinks is not None:
        sinks = scope.sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.softmax(dim=-1, dtype=softmax_dtype).to(v_BNLD.dtype)
    if scope.sinks is not None:
        probabilities = probabilities[..., :-1]
    if drop is not None:
        ids_BL = drop.token_ids_BL
        probabilities = drop.between(probabilities, ids_BL[:, -S:], ids_BL)
    return (probabilities @ v_BNLD).transpose(1, 2)


def ids_of(documents: Documents) -> Tensor:
    """Index [B, L] of each token's document among all rows'."""
    lengths = torch.tensor(documents.lengths)
    return torch.arange(len(lengths)).repeat_interleave(lengths).view(documents.rows, -1)


def _seen(S: int, k_BLGD: Tensor, scope: Scope) -> Tensor:
    """Mask of the keys each of the last S tokens sees: [S, L], or [B, 1, S, L] with documents."""
    L = k_BLGD.shape[1]
    seen = torch.ones(S, L, dtype=torch.bool, device=k_BLGD.device).tril(L - S)
    if scope.window is not None:
        seen = seen.triu(L - S - scope.window)
    if scope.documents is None:
        return seen
    ids_BL = ids_of(scope.documents).to(k_BLGD.device)
    return (seen & (ids_BL[:, L - S :, None] == ids_BL[:, None, :]))[:, None]
