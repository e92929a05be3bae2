"""Settings that layouts of special layers share, and what each of these layouts has to pass."""

from pathlib import Path
from typing import Any

from fivefold.audit.report import audit
from fivefold.check import check
from fivefold.tell.describe import parallelism
from tests.audit.test_audit import records_of
from tests.verify.cases import MODELS, config, verify_in_pool

Case = tuple[int, str, dict[str, Any]]
"""Ranks, a key of MODELS, settings."""


def context(ranks: int, *kinds: str) -> dict[str, Any]:
    sizes = {"hierarchical_context_parallel_sizes": (2, ranks // 2)} if "a2a+p2p" in kinds else {}
    return {"context_parallel_size": ranks, "cp_comm_type": kinds} | sizes


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


DROP = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
WHOLE = {"reset_attention_mask": False}
MOVED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
    "min_offloaded_tensor_size": 1,
}
BUBBLES = {"pipeline_schedule": "zb_h1", "micro_batch_size": 1}


def computes_what_one_device_does(case: Case) -> None:
    """In one step, for which these layers keep nothing of an earlier one."""
    ranks, family, values = case
    report = verify_in_pool(ranks, config(MODELS[family], ranks, **values), steps=1)
    assert report.passed, report.text()
    assert None not in report.max_rel_error.values()


def does_what_theory_says(case: Case, folder: Path) -> None:
    ranks, family, values = case
    layout = check(config(MODELS[family], ranks, **values | WHOLE), ranks)
    report = audit(parallelism(layout), layout, records_of(layout, 1, folder), None, None)
    assert report.passed, report.text()
    for finding in report.findings:
        if finding.name.startswith("activations"):
            assert finding.measured == finding.predicted, finding
