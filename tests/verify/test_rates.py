"""Learning rates of the ends, and a weight decay that grows, in layouts that copy, split and move
the embedding."""

from typing import Any

import pytest

from tests.verify.cases import MODELS, chosen, config, flags, verify_in_pool

RATES: dict[str, Any] = {
    "decoupled_lr": 0.03,
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.1,
    "end_weight_decay": 2.0,
}
MTP = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|ttmL"}
BF16 = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "copies of a tied embedding": (4, "gpt", flags(tp=2, pp=2)),
    "ZeRO-3": (2, "llama", flags(dp=2, strategy="optim_grads_params")),
    "on the host": (2, "gpt", flags(dp=2, strategy="optim") | {"optimizer_cpu_offload": True}),
    "on the device by buckets": (1, "llama", flags() | {"offload_optimizer_states": True}),
    "Muon": (2, "llama", flags(tp=2) | {"optimizer": "muon"}),
    "MTP": (2, "llama tied", flags(pp=2) | MTP),
    "rounded moments": (1, "llama", flags() | BF16),
}


@pytest.mark.parametrize("name", chosen(CASES, "on the host", "Muon", "MTP"))
def test_ends_and_layers_move_by_their_rates(name: str) -> None:
    ranks, model, values = CASES[name]
    report = verify_in_pool(ranks, config(MODELS[model], ranks, **values, **RATES))
    assert report.passed, report.text()
