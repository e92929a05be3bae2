"""What a run costs with failures, at any rate of them: in words, and as JSON."""

import json
from dataclasses import replace
from functools import cache

import pytest

from fivefold.cli.plan_options import Options
from fivefold.config.sources import load_with_origins
from fivefold.files import finite
from fivefold.predict.cluster_file import load_cluster
from fivefold.reliability import INTERRUPTIONS_PER_GPU_DAY
from fivefold.search.request import request
from fivefold.search.search import SearchResult, search
from fivefold.tell.record import as_json
from fivefold.tell.report import cost, cost_lines

TOKENS = 1e12
LLAMA = "Llama 3's 54 days"


@cache
def planned() -> SearchResult:
    loaded = load_with_origins(["debug"], Options, models=True)
    return search(request(loaded.config, load_cluster("H100", 2)))


def failing(rate: float | None, price: float | None = 2.0) -> SearchResult:
    """The plan for a machine of so many interruptions of a GPU a day."""
    asked = planned().request
    cluster = replace(asked.cluster, interruptions_per_gpu_day=rate, price_per_gpu_hour=price)
    return replace(planned(), request=replace(asked, cluster=cluster))


@pytest.mark.parametrize("rate", [1e-9, 1e-3, 1.0, 1e5, 1e300])
def test_any_rate_of_failures_is_told(rate: float) -> None:
    result = failing(rate)
    told, found = "\n".join(cost_lines(result, TOKENS)), cost(result, TOKENS)
    assert LLAMA not in told and f"the cluster's rate, {rate:g} of a GPU a day" in told
    assert "nan" not in told and " inf" not in told
    assert found.wall >= found.seconds and found.goodput is not None
    assert ("in all: no end" in told) == (found.goodput.share == 0)
    json.dumps(finite(as_json(result, TOKENS, 1)), allow_nan=False)


def test_one_of_a_kind_is_one() -> None:
    told = "\n".join(cost_lines(failing(None), 1.0))
    assert "are 1 step: " in told


def test_the_rate_of_a_published_run_is_called_so() -> None:
    assert LLAMA in "\n".join(cost_lines(failing(INTERRUPTIONS_PER_GPU_DAY), TOKENS))
    assert not any("failures" in line for line in cost_lines(failing(None), TOKENS))


@pytest.mark.parametrize("rate", [None, 0.01, 3.0])
def test_interruptions_are_paid_for(rate: float | None) -> None:
    found = cost(failing(rate), TOKENS)
    assert found.price == pytest.approx(found.wall / 3600 * 2 * 2.0)
    assert cost(failing(rate, price=None), TOKENS).price is None
