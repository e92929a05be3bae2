"""Scores of continuations: each as the model gives it when it is asked for nothing else."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.sources import read_config
from fivefold.errors import FivefoldError
from fivefold.inference.score import Scorer
from fivefold.model.batch import Batch
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage
from fivefold.verify.reference import plain_model

WINDOW = 12


@cache
def model(recipe: str) -> Stage:
    config = read_config(recipe, make_vocab_size_divisible_by=1000)
    stage = plain_model(config, torch.float64).eval()
    initialise(stage, 1)
    with torch.no_grad():
        stage.lm_head.weight.mul_(20.0)  # so that the most likely token depends on the context
    return stage


def alone(stage: Stage, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """By one pass over one sequence, cut to the window."""
    tokens = torch.tensor([*context, *continuation][-(WINDOW + 1) :])
    row, place = tokens[None, :-1], torch.arange(len(tokens) - 1)[None]
    with torch.no_grad():
        logits = stage.logits(Batch(row, row, place, None, place))
    logs = logits[-len(continuation) :, : stage.model.vocab_size].log_softmax(-1)
    likely = logs.argmax(-1).tolist() == continuation
    return sum(float(log[n]) for log, n in zip(logs, continuation, strict=True)), likely


TOKENS = st.integers(0, 5)
REQUESTS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=15), st.lists(TOKENS, min_size=1, max_size=4)),
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["debug", "debug-mixtral"])
@settings(max_examples=15)
@given(requests=REQUESTS, most=st.sampled_from([1, 20, 1000]))
def test_together_requests_have_the_scores_that_each_has_alone(recipe, requests, most):
    """Few different tokens, so that inputs repeat and continuations share them."""
    stage = model(recipe)
    found = Scorer(stage, WINDOW, most).score([(tuple(c), tuple(x)) for c, x in requests])
    for (context, continuation), (score, likely) in zip(requests, found, strict=True):
        expected = alone(stage, context, continuation)
        assert score == pytest.approx(expected[0], rel=1e-12) and likely == expected[1]


@pytest.mark.slow
def test_the_most_likely_continuation_is_known_as_such():
    stage, context = model("debug"), [3, 1, 4]
    chosen = []
    for _ in range(3):
        row, place = torch.tensor([context + chosen]), torch.arange(3 + len(chosen))[None]
        with torch.no_grad():
            logits = stage.logits(Batch(row, row, place, None, place))
        chosen.append(int(logits[-1, : stage.model.vocab_size].argmax()))
    other = [*chosen[:2], chosen[2] ^ 1]
    found = Scorer(stage, WINDOW, 100).score([((3, 1, 4), tuple(x)) for x in (chosen, other)])
    assert [likely for _, likely in found] == [True, False]


def test_a_continuation_that_is_too_long_is_refused():
    with pytest.raises(FivefoldError, match="13 tokens is to be scored, and the model reads 12"):
        Scorer(model("debug"), WINDOW, 100).score([((1,), tuple(range(13)))])
