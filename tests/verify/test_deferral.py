"""Weight gradients that wait: exact under every sharding strategy, tied or tensor parallel."""

from typing import Any

import pytest

from tests.verify.cases import MODELS, STAGES, chosen, config, flags, verify_in_pool


def _schedule(name: str, **layout: Any) -> dict[str, Any]:
    return flags(**layout) | {"pipeline_schedule": name, "micro_batch_size": 1}


V_STAGES = "v:E|t|t|tL"

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ZeRO-1, tied over the pipeline": (
        4,
        "llama tied",
        _schedule("zb_h1", pp=2, stages="Et|ttL", strategy="optim"),
    ),
    "ZeRO-2": (4, "gpt", _schedule("zb_h2", pp=2, stages="Et|ttL", strategy="optim_grads")),
    "ZeRO-2, without overlap": (
        4,
        "llama",
        _schedule("zb_h1", pp=2, stages="Et|ttL", strategy="optim_grads")
        | {"overlap_grad_reduce": False},
    ),
    "ZeRO-3, both ends of a tied model on one rank": (
        4,
        "llama tied",
        _schedule("zb_v", pp=2, stages=V_STAGES, strategy="optim_grads_params"),
    ),
    "HSDP, ZeRO-3": (
        8,
        "gpt",
        _schedule("zb_h1", pp=2, stages="Et|ttL", strategy="optim_grads_params", replicas=2),
    ),
    "tensor parallel, replicated": (
        4,
        "gpt",
        _schedule("zb_h1", tp=2, pp=2, stages="Et|ttL", sequence=True),
    ),
    "key/value heads fewer than ranks, ZeRO-2": (
        8,
        "llama",
        _schedule("v_half", tp=2, pp=2, stages=V_STAGES, sequence=True, strategy="optim_grads")
        | {"num_query_groups": 1},
    ),
    "more stages than microbatches, replicated": (
        4,
        "gpt",
        _schedule("zb_h1", pp=4, stages=STAGES[4, 1]) | {"global_batch_size": 2},
    ),
    "on one stage": (2, "llama tied", _schedule("zb_h1", strategy="optim_grads_params")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "ZeRO-1, tied over the pipeline",
        "ZeRO-3, both ends of a tied model on one rank",
        "more stages than microbatches, replicated",
    ),
)
def test_deferred_weights(case: str) -> None:
    world, model, settings = CASES[case]
    report = verify_in_pool(world, config(MODELS[model], world, **settings))
    assert report.passed, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", chosen((1, 2), 1))
def test_deferred_weights_of_a_linear_loss(replicas: int) -> None:
    """Its norm and head leave nothing for later, and are reduced all the same."""
    ranks = 4 * replicas
    layout = _schedule("zb_h1", pp=2, stages="Et|ttL", strategy="optim_grads", replicas=replicas)
    linear = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    report = verify_in_pool(ranks, config(MODELS["llama"], ranks, **layout | linear))
    assert report.passed, report.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", chosen(["no_shard", "optim", "optim_grads_params"], "no_shard")
)
def test_deferred_weights_in_bf16(strategy: str) -> None:
    """The sums over microbatches are in fp32, however late they come."""
    settings = _schedule("zb_h1", pp=2, stages="Et|ttL", strategy=strategy)
    report = verify_in_pool(4, config(MODELS["llama tied"], 4, **settings | {"precision": "bf16"}))
    assert report.passed, report.text()
