"""Attention sinks, windows in some layers, GPT-NeoX's layers: exact in every layout, and as large
as theory says."""

from pathlib import Path
from typing import Any

import pytest

from fivefold.audit.report import audit
from fivefold.check import check
from fivefold.verify.report import describe
from tests.audit.test_audit import records_of
from tests.verify.cases import MODELS, chosen, config, flags, verify_in_pool
from tests.verify.test_latent import BUBBLES, DROP, MOVED, WHOLE, context, selective

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "sinks": (1, "sinks", flags()),
    "sinks, tensor parallel, dropout": (2, "sinks", flags(tp=2) | DROP),
    "sinks, sequence parallel": (4, "sinks", flags(tp=4, sequence=True)),
    "sinks, ring": (2, "sinks", flags() | context(2, "p2p")),
    "sinks, gathered, dropout": (2, "sinks", flags() | context(2, "all_gather") | DROP),
    "sinks, exchanged heads": (4, "sinks", flags(tp=2) | context(2, "a2a")),
    "sinks, hierarchical": (4, "sinks", flags() | context(4, "a2a+p2p")),
    "sinks of latents, gathered": (
        4,
        "latent",
        flags(tp=2) | context(2, "all_gather") | {"softmax_type": "learnable"},
    ),
    "sinks, attention recomputed, ZeRO-3": (
        4,
        "sinks",
        flags(dp=2, strategy="optim_grads_params")
        | context(2, "p2p")
        | selective("core_attn", "mlp"),
    ),
    "sinks, moved": (2, "sinks", flags(tp=2, sequence=True) | MOVED),
    "sinks, deferred weights": (4, "sinks", flags(tp=2, pp=2, sequence=True) | BUBBLES),
    "gpt-oss, experts on ranks, sequence parallel": (
        4,
        "oss",
        flags(tp=2, sequence=True, dp=2)
        | {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"},
    ),
    "gpt-oss, experts split, ring": (
        4,
        "oss",
        context(4, "p2p")
        | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
        | selective("moe_act", "core_attn"),
    ),
    "neox, dropped": (1, "neox", flags()),
    "neox, tensor parallel": (2, "neox", flags(tp=2)),
    "neox, sequence parallel, recomputed": (
        2,
        "neox",
        flags(tp=2, sequence=True) | {"recompute_granularity": "full"},
    ),
    "neox, norms recomputed": (2, "neox", flags(tp=2) | selective("layernorm", "mlp")),
    "neox, moved, ring": (2, "neox", flags() | MOVED | context(2, "p2p")),
    "neox, deferred weights, ZeRO-2": (
        4,
        "neox",
        flags(pp=2, dp=2, strategy="optim_grads") | BUBBLES,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "sinks, hierarchical",
        "sinks, moved",
        "gpt-oss, experts split, ring",
        "neox, tensor parallel",
        "neox, deferred weights, ZeRO-2",
    ),
)
def test_layouts(case: str) -> None:
    ranks, family, values = CASES[case]
    report = verify_in_pool(ranks, config(MODELS[family], ranks, **values))
    assert report.passed, report.text()
    assert None not in report.max_rel_error.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in chosen(CASES, *list(CASES)[::6]) if "experts" not in str(c)]
)
def test_bytes_and_products_are_those_of_theory(case: str, tmp_path: Path) -> None:
    ranks, family, values = CASES[case]
    layout = check(config(MODELS[family], ranks, **values | WHOLE), ranks)
    report = audit(describe(layout), layout, records_of(layout, 1, tmp_path), None, None)
    assert report.passed, report.text()
    for finding in report.findings:
        if finding.name.startswith("activations"):
            assert finding.measured == finding.predicted, finding
