"""Context-parallel attention to the tokens that an indexer chooses.

Queries stay on their rank. What chooses among all tokens is small: ranks gather the latent and the
indexer's key of each token, and project keys and values up themselves, as
`latent.GatheredLatents` does. Shapes as there; F: features of a latent and of an indexer's key.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.context.transport import Gather, Own
from fivefold.model.attention.blockwise import Keys
from fivefold.model.attention.grouped_query import Scope, Up
from fivefold.model.attention.sparse import Choosing, View, attended, gradients
from fivefold.model.batch import Documents
from fivefold.model.dropout import HeadDropout
from fivefold.model.shards import MicrobatchShare


@dataclass(frozen=True)
class SparseLatents:
    """Attention of this rank's queries to chosen ones of all ranks' tokens.

    It sends what `GatheredLatents` does, with the indexer's keys beside the latents.

    Attributes:
        group: context-parallel group.
    """

    group: dist.ProcessGroup

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
        assert index is not None and part is not None, "attention to all needs no indexer"
        scale = scope.scores.factor(q_BSND.shape[3])
        begins_BL = _begins(scope.documents, part)
        rest = _Rest(up, part, Gather(self.group, 1), index.rule, begins_BL, scale)
        chosen_by = index.q_BSID, index.k_BLD, index.w_BSI
        out: Tensor = _Latents.apply(rest, q_BSND, latent_BSC, *chosen_by, *parameters)
        return out


@dataclass(frozen=True)
class _Rest:
    """What is no tensor of the graph.

    Attributes:
        up: projects latents to keys and values.
        part: which tokens this rank has.
        gather: how it comes by those of others.
        rule: how tokens are chosen.
        begins_BL: as of `View`.
        scale: factor of q k^T.
    """

    up: Up
    part: MicrobatchShare
    gather: Gather
    rule: Choosing
    begins_BL: Tensor | None
    scale: float

    def own(self, latent: Tensor, key: Tensor) -> Own:
        """Both as the keys of one head, without values, for transport."""
        both = torch.cat((latent, key), dim=-1)
        return Own(both[:, :, None], both.shape[-1], self.part, None)

    def view(self, arrived: Keys) -> View:
        """Which of the tokens that have arrived queries see."""
        return View(self.part.spans, arrived.spans, self.part.shards.sight, self.begins_BL)


class _Latents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: _Rest, *tensors: Tensor) -> Tensor:
        q, latent, iq, ik, iw, *parameters = tensors
        (arrived,) = rest.gather.forward(rest.own(latent, ik))
        latents, keys = _apart(arrived, latent)
        of_all = q, *rest.up(latents), iq, keys, iw
        out, lse = attended(of_all, rest.rule, rest.view(arrived), rest.scale)
        ctx.save_for_backward(q, latent, iq, ik, iw, out, lse)
        ctx.rest, ctx.parameters = rest, parameters
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, latent, iq, ik, iw, out, lse = ctx.saved_tensors
        rest: _Rest = ctx.rest
        steps = rest.gather.backward(rest.own(latent, ik))
        arrived = next(steps)
        latents, keys = _apart(arrived, latent)
        with torch.enable_grad():
            latents = latents.detach().requires_grad_()
            k, v = rest.up(latents)
        of_all = q, k.detach(), v.detach(), iq, keys, iw
        rule, view = rest.rule, rest.view(arrived)
        dq, dk, dv, diq, dik, diw = gradients(of_all, rule, view, rest.scale, grad, out, lse)
        read = latents, *ctx.parameters
        d_latents, *d_parameters = torch.autograd.grad((k, v), read, (dk, dv))
        both = torch.cat((d_latents, dik), dim=-1)[:, :, None]
        both = both.to(torch.promote_types(both.dtype, torch.float32))
        try:
            steps.send((both, both[..., :0]))
        except StopIteration as end:
            own = end.value[:, :, 0].to(latent.dtype)
        d_latent, d_key = own.split([latent.shape[-1], ik.shape[-1]], dim=-1)
        return None, dq, d_latent, diq, d_key, diw, *d_parameters


def _apart(arrived: Keys, latent: Tensor) -> tuple[Tensor, Tensor]:
    """The latents and the indexer's keys of all tokens that have arrived."""
    latents, keys = arrived.k[:, :, 0].tensor_split([latent.shape[-1]], dim=-1)
    return latents, keys


def _begins(documents: Documents | None, part: MicrobatchShare) -> Tensor | None:
    """Those of `View`, where packed rows are laid end to end."""
    if documents is None:
        return None
    begins_BL = documents.begins_BL
    rows, length = begins_BL.shape
    before = torch.arange(rows, device=begins_BL.device)[:, None] * length
    return (begins_BL + before).reshape(part.shards.rows, -1)
