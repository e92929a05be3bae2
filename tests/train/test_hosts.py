"""Tensor-parallel groups on several hosts are named."""

import pytest

from fivefold.check import check
from fivefold.train.ranks.hosts import crossing
from tests.verify.cases import MODELS, config

TP2 = check(config(MODELS["gpt"], tensor_model_parallel_size=2), 8)


@pytest.mark.parametrize("hosts", [["a"] * 8, ["a"] * 4 + ["b"] * 4, ["a", "a", "b", "b"] * 2, []])
def test_groups_within_hosts(hosts: list[str]) -> None:
    assert crossing(TP2, hosts) is None


def test_a_group_across_hosts_is_named() -> None:
    said = crossing(TP2, ["a"] * 3 + ["b"] * 5)
    assert said is not None
    assert "ranks 2 to 3 crosses hosts a, b" in said
    assert "1 of 4 such groups" in said
    assert "3 or 5 ranks, of which tp 2 should be a divisor" in said
