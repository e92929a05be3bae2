"""Products that add weight gradients to those of earlier microbatches: exact, as often as said."""

from typing import Any

import pytest
from torch import Tensor

from fivefold.check import check
from fivefold.model.products import Products
from fivefold.verify.report import VerifyReport
from tests.verify.cases import (
    MODELS,
    STAGES,
    chosen,
    compare_on_rank,
    config,
    flags,
    verify_in_pool,
)

FEW_HEADS = {"num_query_groups": 1}

# (ranks, model, settings, share of the products that add)
CASES: dict[str, tuple[int, str, dict[str, Any], float]] = {
    "switched off": (2, "llama", {"gradient_accumulation_fusion": False}, 0.0),
    "ZeRO-1": (2, "llama tied", {}, 1 / 2),
    "ZeRO-1, biases, bf16": (2, "gpt", {"precision": "bf16"}, 1 / 2),
    "ZeRO-2, which keeps no sum": (2, "llama", flags(strategy="optim_grads"), 0.0),
    "replicated": (2, "llama", flags(strategy="no_shard"), 1 / 2),
    "one replica, few key/value heads": (
        2,
        "llama",
        flags(tp=2, sequence=True, strategy="no_shard") | FEW_HEADS,
        1 / 2,
    ),
    "deferred": (
        2,
        "gpt",
        flags(pp=2, stages=STAGES[2, 1], strategy="no_shard") | {"pipeline_schedule": "zb_h1"},
        3 / 4,
    ),
    "recomputed: PyTorch's linears": (2, "llama", {"recompute_granularity": "full"}, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, "switched off", "ZeRO-1", "replicated", "deferred"))
def test_sums_of_weight_gradients_are_exact(case: str) -> None:
    ranks, model, more, share = CASES[case]
    settings = {"data_parallel_sharding_strategy": "optim"} | more | {"micro_batch_size": 1}
    batch = config(MODELS[model], ranks, **settings)
    microbatches = check(batch, ranks).num_microbatches
    assert share in (0, 1 - 1 / microbatches) and microbatches >= 2
    report = verify_in_pool(ranks, batch, on_rank=_Counting(share))
    assert report.passed, report.text()


class _Counting:
    """Compares on a rank, and counts the weight gradients that products add."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, *arguments: Any) -> VerifyReport | None:
        plain, first, adds = Products.weight_gradient, Products.write_weight_gradient, []

        def counted(
            self: Products, grad_TF: Tensor, x_TH: Tensor, onto_FH: Tensor | None = None
        ) -> Tensor:
            adds.append(onto_FH is not None)
            return plain(self, grad_TF, x_TH, onto_FH)

        def written(self: Products, grad_TF: Tensor, x_TH: Tensor, out_FH: Tensor) -> None:
            adds.append(False)
            first(self, grad_TF, x_TH, out_FH)

        Products.weight_gradient, Products.write_weight_gradient = counted, written
        try:
            report = compare_on_rank(*arguments)
        finally:
            Products.weight_gradient, Products.write_weight_gradient = plain, first
        assert sum(adds) == self.share * len(adds)
        assert bool(adds) or not self.share
        return report
