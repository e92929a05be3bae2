"""Attention to the tokens that an indexer chooses, from the latents of all tokens.

Queries stay on their rank. What chooses among all is small: context-parallel ranks gather the
latent and the indexer's key of each token. Keys and values of all are projected from these, as
`latent.GatheredLatents` does, or where that is cheaper queries read the latents of chosen tokens
alone (`model.attention.chosen`), on one rank, too. Shapes as in `latent`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.context.transport import Gather, OwnTokens, SingleRank, Transport
from fivefold.model.attention import chosen, sparse
from fivefold.model.attention.blocks import DocumentMask
from fivefold.model.attention.blockwise import Keys
from fivefold.model.attention.grouped_query import Scope, Up
from fivefold.model.attention.sparse import ChoiceSettings, View
from fivefold.model.batch import Documents
from fivefold.model.dropout import HeadDropout
from fivefold.model.shards import MicrobatchShare, Shards


@dataclass(frozen=True)
class SparseLatents:
    """Attention of this rank's queries to chosen ones of all ranks' tokens.

    It sends what `GatheredLatents` does, with the indexer's keys beside the latents.

    Attributes:
        group: context-parallel group; None: this rank has all tokens.
        alone: whether queries read the latents of chosen tokens alone.
    """

    group: dist.ProcessGroup | None
    alone: bool

    def __call__(
        self,
        q_BSND: Tensor,
        latent_BSC: Tensor,
        up: Up,
        parameters: tuple[Tensor, ...],
        scope: Scope,
        drop: HeadDropout | None,
    ) -> Tensor:
        """See `LatentKernel`; the shared rotary key follows the latent."""
        index, part = scope.index, scope.part
        assert index is not None, "attention to all needs no indexer"
        rows, length, _, features = q_BSND.shape
        whole = (0, length)
        part = part or MicrobatchShare(Shards(rows, DocumentMask(whole), ((whole,),)), 0)
        transport = SingleRank() if self.group is None else Gather(self.group, 1)
        begins_BL = _begins(scope.documents, part)
        scale = scope.scores.factor(features)
        rest = _Rest(up, part, transport, self.alone, index.rule, begins_BL, scale)
        chosen_by = index.q_BSID, index.k_BLD, index.w_BSI
        out: Tensor = _Latents.apply(rest, q_BSND, latent_BSC, *chosen_by, *parameters)
        return out


@dataclass(frozen=True)
class _Rest:
    """Arguments that are not tensors of the graph.

    Attributes:
        up: projects latents to keys and values.
        part: which tokens this rank has.
        transport: how it comes by those of others.
        alone: whether queries read the latents of chosen tokens alone.
        rule: how tokens are chosen.
        begins_BL: as of `View`.
        scale: factor of q k^T.
    """

    up: Up
    part: MicrobatchShare
    transport: Transport
    alone: bool
    rule: ChoiceSettings
    begins_BL: Tensor | None
    scale: float

    def own(self, latent: Tensor, key: Tensor) -> OwnTokens:
        """Latents and indexer keys as the keys of one head, without values, for transport."""
        both = torch.cat((latent, key), dim=-1)
        return OwnTokens(both[:, :, None], both.shape[-1], self.part, None)

    def view(self, arrived: Keys) -> View:
        """The received tokens that queries see."""
        return View(self.part.spans, arrived.spans, self.part.shards.mask, self.begins_BL)


class _Latents(torch.autograd.Function):
    """Autograd function that saves only its rank's own tensors, its result and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, rest: _Rest, *tensors: Tensor) -> Tensor:
        q, latent, *index = tensors[:5]
        (arrived,) = rest.transport.forward(rest.own(latent, index[1]))
        latents, index[1] = _apart(arrived, latent)
        view = rest.view(arrived)
        if rest.alone:
            read = _read(q, latents, index, tensors[5])
            out, lse = chosen.attended(read, rest.rule, view, rest.scale)
        else:
            of_all = q, *rest.up(latents), *index
            out, lse = sparse.attended(of_all, rest.rule, view, rest.scale)
        ctx.save_for_backward(*tensors[:5], out, lse)
        ctx.rest, ctx.parameters = rest, tensors[5:]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, latent, *index, out, lse = ctx.saved_tensors
        rest: _Rest = ctx.rest
        steps = rest.transport.backward(rest.own(latent, index[1]))
        arrived = next(steps)
        latents, index[1] = _apart(arrived, latent)
        view, saved = rest.view(arrived), (grad, out, lse)
        if rest.alone:
            (weight,) = ctx.parameters
            read = _read(q, latents, index, weight)
            found = chosen.gradients(read, rest.rule, view, rest.scale, saved)
            dq, d_latents, *d_parameters, diq, dik, diw = found
        else:
            with torch.enable_grad():
                latents = latents.detach().requires_grad_()
                k, v = rest.up(latents)
            of_all = q, k.detach(), v.detach(), *index
            dq, dk, dv, diq, dik, diw = sparse.gradients(of_all, rest.rule, view, rest.scale, saved)
            made_of = latents, *ctx.parameters
            d_latents, *d_parameters = torch.autograd.grad((k, v), made_of, (dk, dv))
        wide = torch.promote_types(latent.dtype, torch.float32)
        both = torch.cat((d_latents.to(wide), dik.to(wide)), dim=-1)[:, :, None]
        try:
            steps.send(both)
        except StopIteration as end:
            own = end.value[:, :, 0].to(latent.dtype)
        d_latent, d_key = own.tensor_split([latent.shape[-1]], dim=-1)
        return None, dq, d_latent, diq, d_key, diw, *d_parameters


def _apart(arrived: Keys, latent: Tensor) -> tuple[Tensor, Tensor]:
    """The latents, and the indexer's keys, of all received tokens."""
    latents, keys = arrived.k[:, :, 0].tensor_split([latent.shape[-1]], dim=-1)
    return latents, keys


def _read(q: Tensor, latents: Tensor, index: list[Tensor], weight: Tensor) -> chosen.Read:
    queries, keys, weights = index
    rotated = latents.shape[-1] - weight.shape[1]
    return chosen.Read(q, latents, weight, (queries, keys, weights), q.shape[3] - rotated)


def _begins(documents: Documents | None, part: MicrobatchShare) -> Tensor | None:
    """Starts of documents, as in `View`; packed rows that ranks split are concatenated."""
    if documents is None:
        return None
    begins_BL = documents.begins_BL
    rows, length = begins_BL.shape
    if rows == part.shards.rows:
        return begins_BL
    before = torch.arange(rows, device=begins_BL.device)[:, None] * length
    return (begins_BL + before).reshape(1, -1)
