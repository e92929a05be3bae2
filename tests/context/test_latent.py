"""Latents gathered and projected up on each rank give what one device gives, and send little."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fivefold.audit.traffic import Traffic
from fivefold.context.latent import GatheredLatents
from fivefold.counts.messages import context_volumes
from fivefold.mesh.grid import Grid
from fivefold.mesh.groups import build_groups
from fivefold.model.attention.grouped_query import Scope
from fivefold.model.attention.scores import Scores
from fivefold.model.batch import taken
from tests.context.test_attention import Case, documents_of, part_of
from tests.model.plain_attention import plain_attention
from tests.pool import run
from tests.verify.cases import shared_groups

HEADS, LATENT, ROTARY, PLAIN = 4, 10, 2, 6  # values have fewer features than keys, as in DeepSeek


def projected(weight: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Latent [B, L, C + R] to keys, of which all heads share the rotary part, and values."""

    def up(latent_BLC: Tensor) -> tuple[Tensor, Tensor]:
        compressed, rotary = latent_BLC.split([LATENT, ROTARY], dim=-1)
        both = (compressed @ weight).unflatten(-1, (HEADS, 2 * PLAIN))
        k, v = both.split(PLAIN, dim=-1)
        shared = rotary[:, :, None].expand(*k.shape[:3], ROTARY)
        return torch.cat((k, shared), dim=-1), v

    return up


def measured(rank: int, world: int, case: Case) -> tuple[float, float]:
    """Largest relative error, and the bytes that were sent."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    shape = case.rows, case.length
    q, latent = random(*shape, HEADS, PLAIN + ROTARY), random(*shape, LATENT + ROTARY)
    weight, grad = random(LATENT, HEADS * 2 * PLAIN), random(*shape, HEADS, PLAIN).detach()
    documents = documents_of(case)
    whole = Scope(documents, case.window, scores=Scores(0.7, 0.5))
    expected = plain_attention(q, *projected(weight)(latent), whole)
    true = [expected, *torch.autograd.grad(expected, (q, latent, weight), grad)]
    with shared_groups():
        groups = build_groups(Grid(cp=world), rank, "cpu", sharded=False)
        part = part_of(case, world, rank)
        scope = replace(whole, part=part)
        own = [taken(x, part).detach().requires_grad_() for x in (q, latent)]
        mine = weight.detach().requires_grad_()
        with Traffic({}) as traffic:
            assert groups.cp is not None
            kernel = GatheredLatents(groups.cp)
            out = kernel(*own, projected(mine), (mine,), scope, None)
            found = torch.autograd.grad(out, (*own, mine), taken(grad, part))
        total = found[2].clone()
        torch.distributed.all_reduce(total)
    wanted = [*(taken(x, part) for x in true[:3]), true[3]]
    pairs = zip([out, *found[:2], total], wanted, strict=True)
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return off, sum(traffic.sent.values())


@pytest.mark.parametrize("world", [2, 4])
def test_latent_attention_is_the_definition_and_sends_the_latent(world: int) -> None:
    case = Case("all_gather", rows=2)
    tokens = case.rows * case.length // world
    volumes = context_volumes(
        "all_gather",
        world,
        query=0,
        key_value=tokens * (LATENT + ROTARY),
        element=8,
        grad_element=8,
    )
    for off, sent in run(world, measured, case):
        assert off < 1e-12
        assert sent == volumes.forward + volumes.backward


def test_documents_and_windows() -> None:
    for case in (Case("all_gather", lengths=((5, 20, 7),)), Case("all_gather", window=3)):
        for off, sent in run(4, measured, case):
            assert off < 1e-12
            assert sent < 3 * 3 * case.length // 4 * (LATENT + ROTARY) * 8
