"""Rows that a token sends to experts: what routing says exactly, and what is expected of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.audit.routed import ChosenExperts
from fivefold.audit.traffic import Traffic, axes_of
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.description.expert_rows import rows_sent
from fivefold.expert.transfer import join, share
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of
from tests.pool import run

RANKS, TOPK, HIDDEN = 8, 8, 4
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=1,
    vocab_size=997,
    max_position_embeddings=64,
    num_experts=256,
    moe_router_topk=TOPK,
    moe_ffn_hidden_size=1,
    init_method_std=1.0,
)


def _layout(dispatcher: str) -> Layout:
    return check(
        Config(model=MODEL).with_values(
            expert_model_parallel_size=RANKS,
            moe_token_dispatcher_type=dispatcher,
            seq_length=64,
            global_batch_size=2 * RANKS,
            micro_batch_size=2,
            precision="fp32",
        ),
        RANKS,
    )


def _sent(rank: int, world: int, dispatcher: str) -> tuple[int, int, float]:
    """Tokens of this rank, rows that they send by what was chosen, and bytes that were sent."""
    layout = _layout(dispatcher)
    engine = Engine(layout, rank, torch.device("cpu"))
    own = microbatches(
        layout.config, global_batch(layout.config, 0), rows_of(layout.config, rank, world)
    )
    choices = ChosenExperts(engine.model.stages, engine.groups)
    engine.model.train(False)
    with Traffic(axes_of(engine.groups)) as traffic, choices:
        engine.evaluate([own])
    (chosen,) = choices.choices.every.values()
    rows = chosen.tokens if dispatcher == "flex" else chosen.rows
    return own[0].tokens_BS.size, sum(rows) - rows[rank], traffic.by_axis["ep"]


@pytest.mark.parametrize(("dispatcher", "expected"), [("flex", 4.63), ("alltoall", 7.0)])
def test_rows_that_a_token_sends_are_those_of_its_choices(dispatcher: str, expected: float) -> None:
    found: list[Any] = run(RANKS, _sent, dispatcher)
    tokens, rows = (sum(of[n] for of in found) for n in (0, 1))
    layout = _layout(dispatcher)
    assert rows_sent(layout.config.parallel.moe_token_dispatcher_type, MODEL, RANKS) == (
        pytest.approx(expected, abs=0.005)
    )
    assert rows / tokens == pytest.approx(expected, rel=0.03)
    once = dispatcher == "flex"
    # A row with its weights in fp32 and numbers of experts goes, and comes back; counts go before.
    there = 4 * HIDDEN + (TOPK * (4 + 8) if once else 4)
    counts = RANKS * (RANKS - 1) * 8 * (1 if once else MODEL.num_experts // RANKS)
    assert sum(of[2] for of in found) == rows * (there + 4 * HIDDEN) + counts


def _joined_and_shared(rank: int, world: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    x = torch.full((rows[rank], 3), float(rank), requires_grad=True)
    y = share(join(x, rows, group), rows, group)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("rows", [[0, 2], [0, 0], [3, 1]], ids=str)
def test_ranks_of_an_expert_may_have_no_rows(rows: list[int]) -> None:
    for rank, (y, grad) in enumerate(run(len(rows), _joined_and_shared, rows)):
        assert torch.equal(y, torch.full((rows[rank], 3), 2.0 * rank))
        assert torch.equal(grad, torch.full((rows[rank], 3), 2.0))
