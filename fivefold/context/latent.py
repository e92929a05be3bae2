"""Latent attention over ranks: what travels is the latent, and each rank projects it up itself.

DeepSeek-V3's latent has 512 + 64 features a token where its keys and values have 40,960, so that
gathering it sends 71 times less. Nothing projected up is kept: the backward gathers and projects
again. Shapes: B rows, S tokens of this rank, L tokens that it sees, C latent features, N heads.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.context.transport import Gather, Own
from fivefold.model.attention import Scope
from fivefold.model.blockwise import Keys, Queries
from fivefold.model.shards import MicrobatchShare

Up = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[B, L, C] -> keys [B, L, N, Dk] and values [B, L, N, Dv], with its parameters' gradients."""


def latent_attention(
    q_BSND: Tensor,
    latent_BSC: Tensor,
    up: Up,
    parameters: tuple[Tensor, ...],
    scope: Scope,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attention of this rank's queries to the keys and values behind the latents of all ranks.

    Of whole rows, (P-1) latents are sent forward and 2 (P-1) backward.

    Args:
        q_BSND: queries of this rank's tokens.
        latent_BSC: their compressed keys and values, rotary part included.
        up: makes keys and values of latents, token by token.
        parameters: all that `up` uses and that needs a gradient.
        scope: scope with the part of the rows that is on this rank.
        group: group of context parallelism.

    Returns:
        [B, S, N, Dv].
    """
    assert scope.part is not None, "whole rows need no context parallelism"
    out: Tensor = _Latent.apply(q_BSND, latent_BSC, up, scope.part, Gather(group, 1), *parameters)
    return out


class _Latent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        up: Up,
        part: MicrobatchShare,
        gather: Gather,
        *parameters: Tensor,
    ) -> Tensor:
        (arrived,) = gather.forward(_own(latent, part))
        k, v = up(_latents(arrived))
        queries = Queries(q, k.shape[2])
        queries.begin(v.shape[-1])
        queries.meet(Keys(k, v, arrived.blocks, arrived.spans))
        out = queries.out.to(q.dtype)
        ctx.save_for_backward(q, latent, out, queries.lse)
        ctx.rest = up, part, gather, parameters
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, out, lse = ctx.saved_tensors
        up, part, gather, parameters = ctx.rest
        steps = gather.backward(_own(latent, part))
        arrived = next(steps)
        with torch.enable_grad():
            latents = _latents(arrived).detach().requires_grad_()
            k, v = up(latents)
        queries = Queries(q, k.shape[2])
        queries.begin_backward(grad, out, lse)
        dk, dv = queries.meet_backward(Keys(k.detach(), v.detach(), arrived.blocks, arrived.spans))
        d_latents, *d_parameters = torch.autograd.grad(
            (k, v), (latents, *parameters), (dk.to(k.dtype), dv.to(v.dtype))
        )
        try:
            d_latents = d_latents[:, :, None].to(queries.wide)
            steps.send((d_latents, d_latents[..., :0]))
        except StopIteration as end:
            d_latent = end.value[:, :, 0].to(latent.dtype)
        return queries.dq.to(q.dtype), d_latent, None, None, None, *d_parameters


def _own(latent_BSC: Tensor, part: MicrobatchShare) -> Own:
    """Latents travel as the keys of one head, without values."""
    return Own(latent_BSC[:, :, None], latent_BSC.shape[-1], part, None)


def _latents(arrived: Keys) -> Tensor:
    return arrived.k[:, :, 0]
