"""Layers with states against a state that takes token by token, document by document."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fivefold.config.huggingface import from_hf_config
from fivefold.description.linear_attention import CHUNK
from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.linear_attention.delta_rule import DELTA_RULE, unit
from fivefold.model.linear_attention.kimi_delta_rule import KIMI_DELTA_RULE
from fivefold.model.linear_attention.recurrence import StateGroup, attend, convolved
from fivefold.model.linear_attention.short_convolution import gated_convolution
from fivefold.model.linear_attention.state_layer import States
from fivefold.model.linear_attention.state_space import STATE_SPACE
from tests.config.families import CASES
from tests.config.oracle import assert_same, oracle
from tests.verify.cases import chosen

GROUP, GROUPS, TAPS = StateGroup(key=5, value=4, shared=2), 2, 3
ALONE = GROUP._replace(shared=1)
Inputs = Sequence[Tensor]


def _delta_inputs(tokens: int) -> list[Tensor]:
    """Queries, keys and values; rates and decays; taps, decays and their bias."""
    return _drawn(tokens, 2, (GROUPS * GROUP.mixed, TAPS), *[(GROUPS * GROUP.shared,)] * 2)


def _space_inputs(tokens: int) -> list[Tensor]:
    """x, B and C; steps; taps and their bias; decays, the bias of steps, and D."""
    features = GROUPS * GROUP.mixed
    return _drawn(tokens, 1, (features, TAPS), (features,), *[(GROUPS * GROUP.shared,)] * 3)


def _kimi_inputs(tokens: int) -> list[Tensor]:
    """Queries, keys and values; rates and decays; taps, decays and their bias."""
    sizes = (GROUPS * ALONE.mixed, TAPS), (GROUPS,), (GROUPS * ALONE.key,)
    return _drawn(tokens, 1 + ALONE.key, *sizes, group=ALONE)


def _convolution_inputs(tokens: int) -> list[Tensor]:
    """x, B and taps."""
    return _drawn(tokens, GROUP.mixed // GROUP.shared, (GROUPS * GROUP.mixed, TAPS))


def _drawn(
    tokens: int, rates: int, *parameters: tuple[int, ...], group: StateGroup = GROUP
) -> list[Tensor]:
    made = torch.Generator().manual_seed(tokens)
    shapes: list[tuple[int, ...]] = [(1, tokens, GROUPS, group.mixed)]
    shapes += [(1, tokens, GROUPS, rates * group.shared), *parameters]
    drawn = [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in drawn]


def _read(case: "Case", inputs: Inputs, starts: Sequence[int]) -> Tensor:
    mixed, rates, *parameters = inputs
    chunks = DocumentChunks.of(starts, mixed.device)
    return case.states(mixed, rates, parameters, case.group, chunks)


def _delta_by_token(inputs: Inputs) -> Tensor:
    """Of one document."""
    mixed, rates, taps, decay, bias = inputs
    length = mixed.shape[1]
    made = convolved(mixed[0].flatten(1), taps, torch.arange(length))
    made = nn.functional.silu(made).unflatten(1, (GROUPS, -1))
    q, k, v = made.split([GROUP.key, GROUP.key, GROUP.shared * GROUP.value], dim=-1)
    q, k, v = unit(q) * GROUP.key**-0.5, unit(k), v.unflatten(2, (GROUP.shared, -1))
    rate, slow = rates[0].chunk(2, dim=-1)
    speed = decay.exp() * nn.functional.softplus(slow + bias.view(GROUPS, -1)).flatten(1)
    kept = (-speed).exp().view(slow.shape)
    state, outs = torch.zeros(GROUPS, GROUP.shared, GROUP.key, GROUP.value, dtype=q.dtype), []
    for t in range(length):
        state = state * kept[t, ..., None, None]
        wrong = v[t] - torch.einsum("gk,grkv->grv", k[t], state)
        written = wrong * rate[t].sigmoid()[..., None]
        state = state + torch.einsum("gk,grv->grkv", k[t], written)
        outs.append(torch.einsum("gk,grkv->grv", q[t], state).flatten(1))
    return torch.stack(outs)[None]


def _kimi_by_token(inputs: Inputs) -> Tensor:
    """Of one document."""
    mixed, rates, taps, decay, bias = inputs
    length = mixed.shape[1]
    made = convolved(mixed[0].flatten(1), taps, torch.arange(length))
    made = nn.functional.silu(made).unflatten(1, (GROUPS, -1))
    q, k, v = made.split([ALONE.key, ALONE.key, ALONE.value], dim=-1)
    q, k = unit(q) * ALONE.key**-0.5, unit(k)
    rate, slow = rates[0].split([1, ALONE.key], dim=-1)
    speed = decay.exp()[:, None] * nn.functional.softplus(slow + bias.view(GROUPS, -1))
    state, outs = torch.zeros(GROUPS, ALONE.key, ALONE.value, dtype=q.dtype), []
    for t in range(length):
        state = state * (-speed[t]).exp()[..., None]
        wrong = v[t] - torch.einsum("gk,gkv->gv", k[t], state)
        state = state + torch.einsum("gk,gv->gkv", k[t], wrong * rate[t].sigmoid())
        outs.append(torch.einsum("gk,gkv->gv", q[t], state))
    return torch.stack(outs)[None]


def _space_by_token(inputs: Inputs) -> Tensor:
    """Of one document."""
    mixed, rates, taps, tap_bias, decay, bias, skip = inputs
    length = mixed.shape[1]
    made = convolved(mixed[0].flatten(1), taps, torch.arange(length)) + tap_bias
    made = nn.functional.silu(made).unflatten(1, (GROUPS, -1))
    x, b, c = made.split([GROUP.shared * GROUP.value, GROUP.key, GROUP.key], dim=-1)
    x = x.unflatten(2, (GROUP.shared, -1))
    step = nn.functional.softplus(rates[0] + bias.view(GROUPS, -1))
    kept = (-decay.exp().view(GROUPS, -1) * step).exp()
    state, outs = torch.zeros(GROUPS, GROUP.shared, GROUP.key, GROUP.value, dtype=x.dtype), []
    for t in range(length):
        state = state * kept[t, ..., None, None]
        state = state + torch.einsum("gk,grv->grkv", b[t], x[t] * step[t, ..., None])
        read = torch.einsum("gk,grkv->grv", c[t], state)
        outs.append((read + skip.view(GROUPS, -1, 1) * x[t]).flatten(1))
    return torch.stack(outs)[None]


def _convolution_by_token(inputs: Inputs) -> Tensor:
    """Of one document."""
    x, b, taps = inputs
    mixed, outs = (x * b)[0].flatten(1), []
    for t in range(len(mixed)):
        reach = range(min(TAPS, t + 1))
        outs.append(torch.stack([mixed[t - j] * taps[:, -1 - j] for j in reach]).sum(0))
    return torch.stack(outs).unflatten(1, (GROUPS, -1))[None]


class Case(NamedTuple):
    """States, what they are told, and the same token by token."""

    states: States
    inputs: Callable[[int], list[Tensor]]
    by_token: Callable[[Inputs], Tensor]
    group: StateGroup = GROUP


RULES = [
    Case(partial(attend, DELTA_RULE), _delta_inputs, _delta_by_token),
    Case(partial(attend, STATE_SPACE), _space_inputs, _space_by_token),
    Case(partial(attend, KIMI_DELTA_RULE), _kimi_inputs, _kimi_by_token, ALONE),
    Case(gated_convolution, _convolution_inputs, _convolution_by_token),
]
of_each_rule = pytest.mark.parametrize("case", RULES, ids=["delta", "space", "kimi", "convolution"])


def _assert_same(inputs: Sequence[Tensor], made: Tensor, expected: Tensor) -> None:
    """The same results, and the same gradients."""
    weights = torch.randn(made.shape, generator=torch.Generator().manual_seed(7)).to(made)
    grads = [torch.autograd.grad((x * weights).sum(), inputs) for x in (made, expected)]
    for a, b in zip((made, *grads[0]), (expected, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@of_each_rule
@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_chunks_give_what_a_state_gives_token_by_token(case: Case, length: int) -> None:
    inputs = case.inputs(length)
    _assert_same(inputs, _read(case, inputs, (0, length)), case.by_token(inputs))


@of_each_rule
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.sampled_from([1, 2, 5, 63, 64, 65, 130]), min_size=1, max_size=6))
def test_packed_documents_are_those_alone(case: Case, lengths: list[int]) -> None:
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    inputs = case.inputs(starts[-1])
    mixed, rates, *parameters = inputs
    alone = [
        _read(case, [mixed[:, a:b], rates[:, a:b], *parameters], (0, b - a))
        for a, b in pairwise(starts)
    ]
    _assert_same(inputs, _read(case, inputs, starts), torch.cat(alone, dim=1))


_DENSE = {"num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3]}


@pytest.mark.parametrize("kind", chosen(["qwen3_next", "kimi_linear"], "kimi_linear"))
def test_logits_and_gradients_of_several_chunks_are_those_of_transformers(kind: str) -> None:
    fields = CASES[kind] | (_DENSE if kind == "qwen3_next" else {"first_k_dense_replace": 3})
    assert_same(from_hf_config(fields), oracle(fields), [[2 * CHUNK + 22]] * 2)
