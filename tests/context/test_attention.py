"""Attention over ranks equals attention on one device: outputs and gradients, in every way."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.parallel import CpCommType
from fivefold.context.balance import split
from fivefold.context.install import make_kernel
from fivefold.mesh.grid import Grid
from fivefold.mesh.groups import build_groups
from fivefold.model.attention.blocks import DocumentMask
from fivefold.model.attention.grouped_query import Scope
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.batch import Batch, Documents, taken
from fivefold.model.dropout import Dropout
from fivefold.model.shards import MicrobatchShare
from tests.model.plain_attention import plain_attention
from tests.pool import run
from tests.verify.cases import chosen, shared_groups

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """Attention of `rows` x `length` tokens; `lengths` of the documents in each row, if packed."""

    kind: CpCommType
    sizes: tuple[int, ...] = ()
    rows: int = 1
    length: int = 32
    heads: int = 8
    kv_heads: int = 8
    lengths: tuple[tuple[int, ...], ...] = ()
    window: int | None = None
    dropout: float = 0.0
    scores: Scores = USUAL
    dtype: torch.dtype = torch.float64


KINDS: tuple[Case, ...] = (
    Case("p2p"),
    Case("all_gather"),
    Case("a2a"),
    Case("a2a+p2p", sizes=(2, -1)),
)
PACKED: dict[str, Any] = {
    "two rows of documents over the edges of chunks": {
        "rows": 2,
        "lengths": ((5, 20, 7), (31, 1)),
    },
    "one-token documents": {"lengths": ((1,) * 16 + (3, 1, 9, 1, 1, 1),)},
    "documents that no chunk divides": {"lengths": ((16, 16),)},
}
SEEN: dict[str, Any] = {
    "whole rows": {"rows": 2},
    "a window": {"window": 5, "scores": Scores(0.7, 0.9)},
    "a window of one token": {"window": 1, "rows": 2},
    "a window beyond the row": {"window": 40},
    "a window in documents": {"window": 3, "lengths": ((5, 20, 7),)},
    **PACKED,
}
SHARED = [(8, 8), (8, 4), (8, 2), (8, 1)]


def documents_of(case: Case) -> Documents | None:
    if not case.lengths:
        return None
    starts = [0]
    for row in case.lengths:
        for n in row:
            starts.append(starts[-1] + n)
    return Documents(tuple(starts), len(case.lengths))


def part_of(case: Case, ranks: int, rank: int) -> MicrobatchShare:
    documents = documents_of(case)
    if documents is None:
        mask = DocumentMask((0, case.length), case.window)
        return MicrobatchShare(split(case.rows, mask, ranks), rank)
    return MicrobatchShare(split(1, DocumentMask(documents.starts, case.window), ranks), rank)


def errors(rank: int, world: int, cases: list[Case]) -> list[float]:
    """Largest error of outputs and gradients of each case, relative to the largest value."""
    return [error(rank, world, case) for case in cases]


def error(rank: int, world: int, case: Case) -> float:
    generator = torch.Generator().manual_seed(7)
    shape = case.rows, case.length

    def random(heads: int) -> Tensor:
        x = torch.randn(*shape, heads, 6, generator=generator, dtype=torch.float64)
        return x.to(case.dtype).requires_grad_()

    q, k, v = random(case.heads), random(case.kv_heads), random(case.kv_heads)
    grad = random(case.heads).detach()
    documents, drop = documents_of(case), None
    if case.dropout:
        ids = 100 + torch.arange(case.rows * case.length).view(shape)
        drop = Dropout(3, 1, ids.flatten(), ids.flatten(), ids).heads(
            case.dropout, "site", 2, case.heads + 2
        )
    whole = Scope(documents, case.window, scores=case.scores)
    expected = plain_attention(q, k, v, whole, drop)
    true = [expected, *torch.autograd.grad(expected, (q, k, v), grad)]
    with shared_groups():
        sizes = tuple(n if n > 0 else world // 2 for n in case.sizes)
        groups = build_groups(Grid(cp=world), rank, "cpu", sharded=False, cp_sizes=sizes)
        part = part_of(case, world, rank)
        kernel = make_kernel(case.kind, groups)
        own = [taken(x, part).detach().requires_grad_() for x in (q, k, v)]
        out = kernel(*own, replace(whole, part=part), drop)
        found = [out, *torch.autograd.grad(out, own, taken(grad, part))]
    off = [
        float((a - taken(b, part)).abs().max() / b.abs().max())
        for a, b in zip(found, true, strict=True)
    ]
    return max(off)


def check(world: int, cases: list[Case]) -> None:
    for found in run(world, errors, cases):
        for case, off in zip(cases, found, strict=True):
            assert off <= TOLERANCE[case.dtype], case


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        [*product([2, 4], SEEN)],
        *((2, seen) for seen in ("whole rows", "a window in documents")),
        *((4, seen) for seen in SEEN),
    ),
    ids=str,
)
def test_every_way_is_the_definition(case: tuple[int, str]) -> None:
    world, seen = case
    check(world, [replace(case, **SEEN[seen]) for case in KINDS])


@pytest.mark.parametrize(
    "seen", chosen(["whole rows", "a window in documents"], "a window in documents")
)
def test_eight_ranks(seen: str) -> None:
    check(8, [replace(case, **SEEN[seen]) for case in KINDS])


@pytest.mark.parametrize("shared", chosen(SHARED, *SHARED[1:]), ids=str)
def test_heads_that_share_keys(shared: tuple[int, int]) -> None:
    heads, kv_heads = shared
    cases = [replace(case, heads=heads, kv_heads=kv_heads) for case in KINDS]
    check(4, [*cases, *(replace(case, window=4) for case in cases)])


def test_heads_that_no_rank_divides() -> None:
    shapes = [(5, 5), (6, 3), (3, 1), (9, 9)]
    kinds = [case for case in KINDS if "a2a" not in case.kind]
    check(4, [replace(case, heads=n, kv_heads=g) for case in kinds for n, g in shapes])


@pytest.mark.parametrize("packed", [(), ((5, 20, 7),)])
def test_dropout_drops_what_one_device_drops(packed: tuple[tuple[int, ...], ...]) -> None:
    dropping = {"dropout": 0.4, "kv_heads": 2, "lengths": packed}
    check(4, [replace(case, **dropping) for case in KINDS])


def test_fp32() -> None:
    cases = [replace(case, dtype=torch.float32, length=256) for case in KINDS]
    check(4, [*cases, *(replace(case, window=9) for case in cases)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [2, 4, 8])
def test_everything_with_everything(world: int) -> None:
    check(
        world,
        [
            replace(case, heads=heads, kv_heads=kv_heads, dropout=dropout, **seen)
            for case in KINDS
            for heads, kv_heads in SHARED
            for dropout in (0.0, 0.3)
            for seen in SEEN.values()
        ],
    )


def test_parts_are_taken_row_by_row_and_end_to_end() -> None:
    case = Case("p2p", rows=2, length=8)
    tokens = torch.arange(16).view(2, 8)
    assert taken(tokens, part_of(case, 2, 0)).tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    packed = replace(case, lengths=((8,), (3, 5)))
    ids = torch.tensor([[0] * 8, [0] * 3 + [1] * 5])
    batch = Batch(tokens, tokens, tokens, ids, tokens + 50)
    part = part_of(packed, 2, 1)
    divided = batch.divided(part)
    assert divided.tokens.shape == (1, 8)
    expected = [p for start, stop in part.spans for p in range(start, stop)]
    assert divided.labels.tolist() == [expected]
    assert divided.own_token_ids.tolist() == [[50 + p for p in expected]]
    assert divided.token_ids.shape == (2, 8), "all may be attended to"
