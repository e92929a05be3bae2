"""Attention that reads the latents of chosen tokens alone is that with a mask over all."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.config.presets import resolve_model
from fivefold.context.sparse import SparseLatents
from fivefold.description import pieces
from fivefold.description.layers import describe_layer
from fivefold.description.running import Running
from fivefold.description.sparse import SparseAttention
from fivefold.model.attention.chosen import places
from fivefold.model.attention.grouped_query import Scope
from fivefold.model.attention.scores import Scores
from fivefold.model.attention.sparse import ChoiceSettings, Index, IndexerTraining
from fivefold.model.batch import Documents
from fivefold.model.context import BackwardLosses

ROWS, LENGTH, HEADS, INDEX_HEADS, DIM, PLAIN, VALUES, LATENT, ROTARY = 2, 17, 3, 2, 4, 5, 7, 6, 2
SIZES = {
    "q": (ROWS, LENGTH, HEADS, PLAIN + ROTARY),
    "latent": (ROWS, LENGTH, LATENT + ROTARY),
    "index_q": (ROWS, LENGTH, INDEX_HEADS, DIM),
    "index_k": (ROWS, LENGTH, DIM),
    "index_w": (ROWS, LENGTH, INDEX_HEADS),
    "weight": (HEADS * (PLAIN + VALUES), LATENT),
}


def projected(weight: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    latent, key = both.split([LATENT, ROTARY], dim=-1)
    k, v = F.linear(latent, weight).unflatten(-1, (HEADS, -1)).split([PLAIN, VALUES], dim=-1)
    return torch.cat((k, key[:, :, None].expand(-1, -1, HEADS, -1)), dim=-1), v


def passed(seed: int, topk: int, taught: bool, starts: Sequence[int], alone: bool) -> list[Tensor]:
    """The output, the indexer's loss, and all gradients."""
    draw = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SIZES.items()}
    made["index_k"][:, ::3] = 0.0  # equal scores, of which the first count
    read = {name: x.requires_grad_() for name, x in made.items()}
    noted = BackwardLosses()
    training = IndexerTraining(0.3, True, None, HEADS, lambda x: x, noted) if taught else None
    rule = ChoiceSettings(INDEX_HEADS, topk, 0.7, training)
    index = Index(read["index_q"], read["index_k"], read["index_w"], rule)
    documents = Documents((0, *starts, ROWS * LENGTH), ROWS) if starts else None
    scope = Scope(documents, index=index, scores=Scores(0.4, None))
    up = partial(projected, read["weight"])
    kernel = SparseLatents(None, alone)
    out = kernel(read["q"], read["latent"], up, (read["weight"],), scope, None)
    out.backward(torch.randn(out.shape, generator=draw, dtype=torch.float64))
    trained = [x for name, x in read.items() if taught or not name.startswith("index")]
    return [out.detach(), *noted.take(), *(x.grad for x in trained if x.grad is not None)]


@settings(max_examples=25)
@given(
    st.integers(0, 999),
    st.sampled_from((1, 4, 9, 40)),
    st.booleans(),
    st.lists(st.integers(1, LENGTH - 1), max_size=3),
    st.sampled_from((40, 400, 1 << 26)),
)
def test_latents_of_chosen_tokens_give_what_a_mask_does(
    seed: int, topk: int, taught: bool, lengths: list[int], at_once: int
) -> None:
    ends = {end for end in accumulate(lengths) if end < ROWS * LENGTH}
    starts = sorted(ends | {LENGTH}) if lengths else []
    with patch.object(pieces, "SCORES", at_once):
        read = passed(seed, topk, taught, starts, True)
        masked = passed(seed, topk, taught, starts, False)
    assert len(read) == len(masked) == (2 + 6 if taught else 1 + 3)
    for one, other in zip(read, masked, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(other.abs().max(), 1.0)


def test_what_the_backward_needs_grows_no_faster_than_a_row() -> None:
    model = resolve_model("deepseek-v3.2")
    core = describe_layer(model, 5).one(SparseAttention)
    needed = {
        length: length * core.working(Running(length, microbatch_tokens=length, reads_chosen=True))
        for length in (16384, 131072)
    }
    assert needed[131072] < 8 * needed[16384]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1), st.integers(1, 6))
def test_places_are_those_of_the_chosen_in_order(chosen: list[list[bool]], count: int) -> None:
    rows = [[at for at, taken in enumerate(row) if taken][:count] for row in chosen]
    mask = torch.zeros(1, len(rows), 6, dtype=torch.bool)
    for row, own in zip(mask[0], rows, strict=True):
        row[own] = True
    found, there = places(mask, count)
    assert [row[ok].tolist() for row, ok in zip(found[0], there[0], strict=True)] == rows
