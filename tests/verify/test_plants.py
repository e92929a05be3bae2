"""Every error that can be planted is found and named, on every kind of layout that can have it."""

from typing import Any, get_args, get_type_hints

import pytest

from fivefold.check import check
from fivefold.cli.verify import Options
from fivefold.errors import ConfigError
from fivefold.verify.plant import PLANTS
from fivefold.verify.run import check_plant
from tests.verify.cases import MIXTURE, MODELS, config, flags, verify_in_pool
from tests.verify.test_context import WHOLE, context


def experts(ep: int, strategy: str = "no_shard", **more: Any) -> dict[str, Any]:
    values = {
        "expert_model_parallel_size": ep,
        "data_parallel_sharding_strategy": strategy,
        "moe_token_dispatcher_type": "flex",
        "global_batch_size": 8,  # no degree equals the number of microbatches
    }
    return values | more


TP = "right once summed over tensor parallelism"
LOST = "keys and values lack the gradients of queries on other context-parallel ranks: layers.2."
SKIPPED = "queries lack the keys that reach a context-parallel rank last"
MIXED = "tokens exchanged for heads are in the order of the ranks, not of the rows"
COUNTED = "positions are counted from the first token of each context-parallel rank"
LIMITED = {  # decisions depend on what other ranks have
    "moe_expert_capacity_factor": 0.7,
    "moe_router_load_balancing_type": ("global_aux_loss",),
    "moe_aux_loss_coeff": (0.1,),
}
DP = "the sum over data parallelism is missing"
CASES: list[tuple[str, int, str, dict[str, Any], str]] = [
    ("skip-tp-sum", 2, "llama", flags(tp=2, sequence=True), TP),
    ("skip-tp-sum", 4, "llama", flags(tp=4), TP),
    (
        "skip-tp-sum",
        6,
        "llama",
        flags(tp=2, pp=3, sequence=True) | {"pipeline_model_parallel_layout": "Et||ttL"},
        TP,
    ),
    ("skip-tp-sum", 4, "gpt", flags(tp=2, dp=2, sequence=True, strategy="optim_grads_params"), TP),
    ("skip-dp-sum", 2, "mixture", flags(dp=2, strategy="optim") | LIMITED, DP),
    ("skip-dp-sum", 2, "gpt", flags(dp=2), DP),
    ("skip-dp-sum", 4, "llama", flags(dp=4, strategy="optim"), DP),
    ("skip-dp-sum", 4, "llama", flags(dp=2, tp=2, strategy="optim_grads_params"), DP),
    (
        "skip-dp-sum",
        4,
        "llama tied",
        flags(dp=4, strategy="optim_grads", replicas=2),
        "the sum over dp_shard is missing",
    ),
    (
        "skip-tied-sum",
        2,
        "llama tied",
        flags(pp=2),
        "embed_tokens.weight: the gradient is right once summed over the copies of the",
    ),
    (
        "skip-tied-sum",
        4,
        "gpt",
        flags(pp=2, dp=2, strategy="optim_grads_params"),
        "summed over the copies of the embedding",
    ),
    ("own-token-count", 2, "llama", flags(dp=2), "each data-parallel rank divides by its own"),
    (
        "own-token-count",
        4,
        "gpt",
        flags(dp=2, tp=2, strategy="optim"),
        "each data-parallel rank divides by its own",
    ),
    ("double-dx", 4, "llama", flags(tp=4), "is 4 = tp"),
    ("double-dx", 2, "gpt", flags(tp=2), "norm.bias, norm.weight and"),
    ("skip-dp-sum", 2, "llama", context(2, "p2p"), "summed over context parallelism: that sum"),
    (
        "skip-dp-sum",
        2,
        "llama",
        flags(strategy="optim") | context(2, "p2p"),
        "is that of some tokens: the sum over context parallelism is missing",
    ),
    (
        "skip-dp-sum",
        4,
        "gpt",
        flags(dp=2, strategy="optim_grads_params") | context(2, "a2a"),
        "is that of some tokens: the sum over data and context parallelism is missing",
    ),
    ("cp-skip-block", 2, "llama", context(2, "p2p", **WHOLE), SKIPPED),
    ("cp-skip-block", 4, "gpt", context(4, "p2p"), SKIPPED),
    ("cp-skip-block", 4, "llama", context(4, "a2a+p2p", **WHOLE), SKIPPED),
    ("cp-skip-block", 2, "latent", context(2, "p2p", **WHOLE), SKIPPED),
    ("cp-skip-block", 2, "sinks", context(2, "p2p", **WHOLE), SKIPPED),
    ("cp-lose-gradients", 2, "llama", context(2, "p2p"), LOST),
    ("cp-lose-gradients", 2, "gpt", context(2, "all_gather", **WHOLE), LOST),
    ("cp-lose-gradients", 4, "llama", context(4, "a2a+p2p", **WHOLE), LOST),
    ("cp-lose-gradients", 2, "latent", context(2, "p2p"), LOST),
    ("cp-rank-order", 2, "llama", context(2, "a2a"), MIXED),
    ("cp-rank-order", 4, "llama", context(4, "a2a+p2p", **WHOLE), MIXED),
    ("cp-local-positions", 2, "llama", context(2, "all_gather"), COUNTED),
    ("cp-local-positions", 4, "gpt", flags(dp=2) | context(2, "a2a", **WHOLE), COUNTED),
    ("bias-on-each-rank", 2, "gpt", flags(tp=2), "the bias of row-parallel linears is added by"),
    (
        "bias-on-each-rank",
        4,
        "gpt",
        flags(tp=4, sequence=True),
        "the bias of row-parallel linears is added by",
    ),
    ("double-experts", 2, "mixture", experts(2), "is 2 = ep = dp times the right one: summed"),
    ("double-experts", 4, "mixture", experts(2, strategy="optim_grads_params"), "is 2 = ep = edp"),
    ("skip-edp-sum", 4, "mixture", experts(2), "summed over expert data parallelism: that sum"),
    (
        "skip-edp-sum",
        4,
        "mixture",
        experts(2, strategy="optim_grads", **LIMITED),
        "is that of some samples: the sum over expert data parallelism is missing",
    ),
    (
        "skip-edp-sum",
        4,
        "mixture",
        experts(2, strategy="optim_grads_params") | context(2, "p2p"),
        "is that of some tokens: the sum over expert data parallelism is missing",
    ),
    (
        "detach-router",
        2,
        "mixture",
        experts(2),
        "layers.0.mlp.router.weight: the gradient is zero: it never",
    ),
    (
        "detach-router",
        2,
        "mixture",
        experts(2, moe_z_loss_coeff=0.01),
        "is that of the losses which balance experts: the main loss does not reach it",
    ),
    (
        "double-expert-counts",
        2,
        "mixture",
        experts(2),
        "the experts' tokens in layers 0, 2 are counted twice on data-parallel rank 0",
    ),
]


FIRST = {case[0]: case for case in reversed(CASES)}  # of each error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "world", "model", "case", "named"),
    [
        pytest.param(
            *case,
            id=f"{case[0]} {case[2]} {case[1]}",
            marks=[] if case in FIRST.values() else pytest.mark.exhaustive,
        )
        for case in CASES
    ],
)
def test_planted_error_fails_and_is_named(
    plant: str, world: int, model: str, case: dict[str, Any], named: str
) -> None:
    report = verify_in_pool(world, config(ALL[model], world, **case), plant)
    assert not report.passed
    assert named in report.diagnosis[0], report.text()
    assert report.max_rel_error["load" if "counts" in plant else "grad"] > 0.1
    assert "FAILED" in report.text()


LAYOUTS = {
    "tensor": flags(tp=2, sequence=True),
    "data": flags(dp=2),
    "ZeRO-3": flags(dp=2, strategy="optim_grads_params"),
    "stages": flags(pp=2),
    "experts": experts(2),
    **{kind: context(2, kind, **WHOLE) for kind in ("p2p", "all_gather", "a2a")},
}
ALL = MODELS | {"mixture": MIXTURE}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ALL)
def test_what_may_be_planted_is_found(model: str, layout: str) -> None:
    settings = config(ALL[model], **LAYOUTS[layout])
    try:
        checked = check(settings, 2)
    except ConfigError:
        return
    for name in [name for name, plant in PLANTS.items() if plant.fits(checked)]:
        assert not verify_in_pool(2, settings, name).passed, name


def test_the_command_line_offers_every_plant() -> None:
    (names, _) = get_args(get_type_hints(Options)["plant"])
    assert set(get_args(names)) == set(PLANTS) == {case[0] for case in CASES}


def test_a_layout_must_be_able_to_make_the_mistake() -> None:
    layout = check(config(MODELS["llama"], **flags(tp=2)), 2)
    with pytest.raises(ConfigError, match="skip-dp-sum needs at least two ranks"):
        check_plant(layout, "skip-dp-sum")
    with pytest.raises(ConfigError, match=r"no error 'typo' to plant\n  works: .*double-dx"):
        check_plant(layout, "typo")
    check_plant(layout, "double-dx")
    check_plant(layout, None)
