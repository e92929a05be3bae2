"""Muon in layouts whose ranks hold parts of matrices, against one device that has them whole."""

from typing import Any

import pytest

from tests.verify.cases import MIXTURE, chosen, config, flags, named, verify_in_pool
from tests.verify.test_layouts import passes

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "replicas": (2, "llama", {}),
    "tensor parallel": (2, "llama tied", flags(tp=2)),
    "fewer KV heads than ranks": (4, "llama", flags(tp=4, sequence=True)),
    "latent, tensor parallel, ZeRO-3": (
        4,
        "latent",
        flags(tp=2, dp=2, sequence=True, strategy="optim_grads_params"),
    ),
    "uneven shards, replicas of them": (8, "gpt", flags(dp=8, strategy="optim", replicas=2)),
    "more shards than rows": (8, "latent", flags(dp=8, strategy="optim_grads")),
    "stages, ZeRO-1, gathered beside the update": (
        4,
        "llama",
        flags(pp=2, dp=2, strategy="optim") | {"overlap_param_gather_with_optimizer_step": True},
    ),
    "two copies of the model": (
        4,
        "llama",
        flags(pp=2, dp=2) | {"pipeline_schedule": "dualpipe", "micro_batch_size": 1},
    ),
    "experts over ranks": (4, "oss", named(ep=2, strategy="optim_grads_params")),
    "parts of experts": (8, "oss", named(ep=2, etp=2, tp=2, strategy="optim")),
    "fewer experts than shards": (8, "oss", named(strategy="optim_grads_params")),
    "context": (4, "llama", named(cp=2, strategy="optim")),
    "adapters, all of them matrices": (2, "llama", {"lora_rank": 2}),
}
# Latent attention's parts are in test_qk_clip.py.
IN_THE_GATE = (
    "stages, ZeRO-1, gathered beside the update",
    "adapters, all of them matrices",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(LAYOUTS, *IN_THE_GATE))
def test_layouts_orthogonalise_whole_matrices(name: str) -> None:
    world, model, settings = LAYOUTS[name]
    nesterov = len(name) % 2 == 0
    passes(world, model, settings | {"optimizer": "muon", "muon_nesterov": nesterov})


@pytest.mark.slow
@pytest.mark.parametrize("precision", chosen(["bf16", "fp16", "fp32"], "bf16"))
def test_other_precisions(precision: str) -> None:
    settings = named(tp=2, strategy="optim_grads", optimizer="muon", precision=precision)
    passes(4, "llama", settings | {"muon_scale_mode": "unit_rms_norm"})


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [8, None])
def test_experts_beside_a_shared_one(shared: int | None) -> None:
    settings = named(ep=2, etp=2, tp=2, strategy="optim_grads_params", optimizer="muon")
    model = config(MIXTURE, 8, moe_shared_expert_intermediate_size=shared, **settings)
    report = verify_in_pool(8, model)
    assert report.passed, report.text()
