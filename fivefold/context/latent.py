"""Context-parallel latent attention: ranks gather latents and project them up themselves.

DeepSeek-V3's latent has 512 + 64 features per token where its keys and values have 40,960, so
gathering latents sends 71 times less. Keys and values are not kept: the backward gathers and
projects again. Shapes: B rows, S tokens of this rank, L tokens that it sees, C latent features,
N heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.context.attention import own_ids
from fivefold.context.transport import Gather, OwnTokens
from fivefold.model.attention.blockwise import Keys, Queries
from fivefold.model.attention.grouped_query import Scope, Up
from fivefold.model.dropout import HeadDropout
from fivefold.model.shards import MicrobatchShare


@dataclass(frozen=True)
class GatheredLatents:
    """Attention of this rank's queries to keys and values projected from all ranks' latents.

    For whole rows, each rank sends its latents P-1 times in the forward and 2 (P-1) times in the
    backward.

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
        assert scope.part is not None, "whole rows need no context parallelism"
        rest = up, scope.part, Gather(self.group, 1), drop, scope.sinks, scope.scores
        out: Tensor = _Latent.apply(q_BSND, latent_BSC, rest, scope.sinks, *parameters)
        return out


class _Latent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        rest: tuple[Any, ...],
        sinks: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        up, part, gather, drop, _, scores = rest
        own, ids = _own(latent, part, drop)
        (arrived,) = gather.forward(own)
        k, v = up(_latents(arrived))
        queries = Queries(q, k.shape[2], drop, ids, scores)
        queries.begin(v.shape[-1], sinks)
        queries.meet(_projected(arrived, k, v))
        out = queries.out.to(q.dtype)
        ctx.save_for_backward(q, latent, out, queries.lse)
        ctx.rest, ctx.parameters = rest, parameters
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, latent, out, lse = ctx.saved_tensors
        up, part, gather, drop, sinks, scores = ctx.rest
        own, ids = _own(latent, part, drop)
        steps = gather.backward(own)
        arrived = next(steps)
        with torch.enable_grad():
            latents = _latents(arrived).detach().requires_grad_()
            k, v = up(latents)
        queries = Queries(q, k.shape[2], drop, ids, scores)
        queries.begin_backward(grad, out, lse)
        both = queries.meet_backward(_projected(arrived, k.detach(), v.detach()))
        dk, dv = both.split([k.shape[-1], v.shape[-1]], dim=-1)
        d_latents, *d_parameters = torch.autograd.grad(
            (k, v), (latents, *ctx.parameters), (dk.to(k.dtype), dv.to(v.dtype))
        )
        try:
            steps.send(d_latents[:, :, None].to(queries.wide))
        except StopIteration as end:
            d_latent = end.value[:, :, 0].to(latent.dtype)
        d_sinks = None if sinks is None else queries.sink_grads(sinks)
        return queries.dq.to(q.dtype), d_latent, None, d_sinks, *d_parameters


def _own(
    latent_BSC: Tensor, part: MicrobatchShare, drop: HeadDropout | None
) -> tuple[OwnTokens, Tensor | None]:
    """Latents as the keys of one head, without values, for transport; and own token ids."""
    ids, mine = own_ids(part, drop)
    return OwnTokens(latent_BSC[:, :, None], latent_BSC.shape[-1], part, ids), mine


def _latents(arrived: Keys) -> Tensor:
    return arrived.k[:, :, 0]


def _projected(arrived: Keys, k: Tensor, v: Tensor) -> Keys:
    return Keys(k, v, arrived.blocks, arrived.spans, None, arrived.ids)
