"""Which experts a token gets, and with which weights: as Megatron-core chooses them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fivefold.config.experts import ExpertsConfig, LoadBalancing
from fivefold.config.model import ModelConfig
from fivefold.model.context import Context
from fivefold.model.moe.capacity import with_ties
from fivefold.model.moe.routing import Router
from tests.verify.cases import MIXTURE

TOKENS, EXPERTS = 64, 8
SCORES: list[dict[str, Any]] = [
    {},
    {"moe_router_pre_softmax": True},
    {"moe_router_score_function": "sigmoid"},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
]
GROUPS = (None, (2, 1), (4, 2), (4, 1), (4, 3))


def _cases() -> Iterator[ModelConfig]:
    for scores, groups, topk in product(SCORES, GROUPS, (1, 2, 3, 4)):
        limits: dict[str, Any] = {}
        if groups is not None:
            number, chosen = groups
            limits = {"moe_router_num_groups": number, "moe_router_group_topk": chosen}
            if not chosen <= topk <= chosen * EXPERTS // number:
                continue
        changes = scores | limits | {"moe_router_topk_scaling_factor": 2.5 if topk == 2 else None}
        yield replace(MIXTURE, moe_router_topk=topk, **changes)


def _router(model: ModelConfig, settings: ExpertsConfig) -> tuple[Router, Tensor]:
    """A random router, and tokens."""
    generator = torch.Generator().manual_seed(3)
    router = Router(model, 1, settings).double().eval()
    router.weight.data.normal_(generator=generator)
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.3, generator=generator)
    return router, torch.randn(TOKENS, model.hidden_size, generator=generator).double()


def _context() -> Context:
    rows = torch.zeros(1, dtype=torch.int64)
    return Context(1, {}, None, None, None, None, {}, None, first_ids_B=rows, step=0)


def _routed(model: ModelConfig, factor: float | None = None) -> tuple[Router, Tensor, Tensor]:
    """A random router with this capacity factor, its logits, and the weight of each expert for each
    token; 0: not chosen, or dropped."""
    router, x_TH = _router(model, ExpertsConfig(moe_expert_capacity_factor=factor))
    choice = router(x_TH, _context())
    weights_TE = torch.zeros(TOKENS, EXPERTS).double()
    weights_TE.scatter_(1, choice.experts_TK, choice.weights_TK.detach())
    return router, x_TH @ router.weight.detach().T, weights_TE


def _expected(model: ModelConfig, logits_E: Tensor, bias_E: Tensor | None) -> Tensor:
    """The weights of one token, written down slowly."""
    topk, sigmoid = model.moe_router_topk, model.moe_router_score_function == "sigmoid"
    scores_E = logits_E
    if sigmoid or model.moe_router_pre_softmax:
        scores_E = logits_E.sigmoid() if sigmoid else logits_E.softmax(0)
    rated = (scores_E if bias_E is None else scores_E + bias_E).tolist()
    allowed = set(range(EXPERTS))
    if model.moe_router_num_groups is not None and model.moe_router_group_topk is not None:
        size = EXPERTS // model.moe_router_num_groups
        groups = [range(start, start + size) for start in range(0, EXPERTS, size)]
        best = topk // model.moe_router_group_topk
        groups.sort(key=lambda group: -sum(sorted(rated[e] for e in group)[-best:]))
        allowed = {e for group in groups[: model.moe_router_group_topk] for e in group}
    chosen = sorted(allowed, key=lambda e: -rated[e])[:topk]
    weights = scores_E[chosen]
    if scores_E is logits_E:
        weights = weights.softmax(0)
    elif sigmoid and topk > 1:
        weights = weights / weights.sum()
    return torch.zeros_like(logits_E).index_copy(
        0, torch.tensor(chosen), weights * (model.moe_router_topk_scaling_factor or 1.0)
    )


@pytest.mark.parametrize("model", _cases())
def test_each_token_gets_its_best_experts(model: ModelConfig) -> None:
    router, logits_TE, weights_TE = _routed(model)
    expected = [_expected(model, logits_E, router.expert_bias) for logits_E in logits_TE]
    torch.testing.assert_close(weights_TE, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", get_args(LoadBalancing))
@pytest.mark.parametrize("scores", SCORES[:3])
def test_an_evaluated_token_gets_its_experts_whatever_others_there_are(
    scores: dict[str, Any], kind: LoadBalancing
) -> None:
    settings = ExpertsConfig(moe_router_load_balancing_type=(kind,), moe_aux_loss_coeff=(0.1,))
    router, x_TH = _router(replace(MIXTURE, moe_router_topk=2, **scores), settings)
    whole = router(x_TH, _context())
    for token in range(0, TOKENS, 7):
        alone = router(x_TH[token : token + 1], _context())
        assert torch.equal(alone.experts_TK[0], whole.experts_TK[token])
        torch.testing.assert_close(alone.weights_TK[0], whole.weights_TK[token])


def test_megatron_chooses_the_same() -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    for model in _cases():
        router, logits_TE, weights_TE = _routed(model)
        theirs, _ = moe_utils.topk_routing_with_score_function(
            logits_TE.float(),
            model.moe_router_topk,
            use_pre_softmax=model.moe_router_pre_softmax,
            num_groups=model.moe_router_num_groups,
            group_topk=model.moe_router_group_topk,
            scaling_factor=model.moe_router_topk_scaling_factor,
            score_function=model.moe_router_score_function,
            expert_bias=None if router.expert_bias is None else router.expert_bias.float(),
        )
        torch.testing.assert_close(weights_TE.float(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0])
@pytest.mark.parametrize("model", _cases())
def test_experts_keep_the_tokens_with_the_highest_weights(
    model: ModelConfig, factor: float
) -> None:
    if _all_weigh_one(model):
        return  # ties, of which the first tokens are kept
    router, _, kept_TE = _routed(model, factor)
    _, _, weights_TE = _routed(model)
    room = router.settings.capacity(TOKENS, model)
    assert room < int((weights_TE > 0).sum(0).max())
    for kept_T, weights_T in zip(kept_TE.T, weights_TE.T, strict=True):
        best = weights_T.topk(room).indices
        assert torch.equal(kept_T, torch.zeros_like(weights_T).index_copy(0, best, weights_T[best]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts", [8, 256, 4096])
def test_scores_are_compared_alike_however_small_many_experts_make_them(
    experts: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits_TE = torch.randn(64, experts, generator=generator, dtype=torch.float64) / 8
    scores_S = logits_TE.softmax(1).flatten().sort().values.to(dtype)
    compared_S = with_ties(scores_S)
    assert bool((compared_S.diff() >= 0).all())
    apart = scores_S[1:] > scores_S[:-1] * (1 + 2.0**-10)
    assert bool((compared_S.diff()[apart] > 0).all())
    epsilon = torch.finfo(dtype).eps
    equal = with_ties(scores_S * (1 + epsilon)) == with_ties(scores_S * (1 - epsilon))
    assert float(equal.double().mean()) > 0.99
    assert float((compared_S / compared_S[0] / (scores_S / scores_S[0]) - 1).abs().max()) < 2**-10


def _all_weigh_one(model: ModelConfig) -> bool:
    after = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    return after and model.moe_router_topk == 1


def test_megatron_drops_the_same() -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    for model in filter(lambda each: not _all_weigh_one(each), _cases()):
        _, _, weights_TE = _routed(model)
        theirs, _ = moe_utils.apply_router_token_dropping(
            weights_TE, weights_TE > 0, model.moe_router_topk, capacity_factor=0.75
        )
        _, _, kept_TE = _routed(model, 0.75)
        assert torch.equal(kept_TE, theirs)
