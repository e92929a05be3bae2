import re
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from fivefold.description.shape import ModelParts, canonical_name, parameter_shapes
from fivefold.model.attention.grouped_query import AttentionBlock
from fivefold.model.batch import Batch
from fivefold.model.loss import IGNORED
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, GPT, LLAMA, TO_ALL, batch_of, build
from tests.model.plain_attention import plain_attention
from tests.model.reference import reference_logits
from tests.verify.cases import chosen


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-12 * b.abs().max())


def weights_of(stage: Stage) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in stage.named_parameters()}


def reference_of(stage: Stage, batch: Batch, lengths: list[list[int]]) -> Tensor:
    documents = []
    for row, row_lengths in zip(batch.tokens, lengths, strict=True):
        documents += row.split(row_lengths)
    weights = weights_of(stage)
    return torch.cat([reference_logits(stage.model, weights, tokens) for tokens in documents])


LENGTHS = {"whole": [[12], [12]], "packed": [[5, 1, 6], [12]]}  # of which one row is whole


@pytest.mark.parametrize(
    "case",
    chosen(
        [*product(FAMILIES, LENGTHS)],
        *product(FAMILIES, ["packed"]),
        *product([*FAMILIES][::5], ["whole"]),
    ),
    ids=str,
)
def test_logits_and_loss_equal_the_naive_transformer(case: tuple[str, str]) -> None:
    family, lengths = case[0], LENGTHS[case[1]]
    stage = build(FAMILIES[family])
    batch = batch_of(stage.model, lengths)
    expected = reference_of(stage, batch, lengths)
    assert close(stage.logits(batch)[:, : stage.model.vocab_size], expected)
    labels, weights = batch.labels.flatten(), batch.loss_weights.flatten()
    log_p = expected.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    loss = -(log_p * weights)[labels != IGNORED].sum()
    assert close(stage(None, batch), loss)


@pytest.mark.parametrize("family", TO_ALL)
def test_plain_and_fused_attention_give_the_same_loss_and_gradients(family: str) -> None:
    fused, plain = build(FAMILIES[family]), build(FAMILIES[family])
    for layer in plain.layers.values():
        if isinstance(layer.self_attn, AttentionBlock):
            layer.self_attn.kernel = plain_attention
    batch = batch_of(fused.model, [[5, 1, 6], [12]])
    losses = [stage(None, batch) for stage in (fused, plain)]
    for loss in losses:
        loss.backward()
    assert close(*losses)
    # Against the largest gradient of all: that of a key bias is zero but for rounding.
    grads = [torch.cat([p.grad.flatten() for p in s.parameters()]) for s in (fused, plain)]
    assert close(*grads)


@pytest.mark.slow
@pytest.mark.parametrize("family", TO_ALL)
def test_gradients_are_those_of_finite_differences(family: str) -> None:
    stage = build(FAMILIES[family])
    batch = batch_of(stage.model, [[3, 5]])
    stage(None, batch).backward()
    generator = torch.Generator().manual_seed(3)
    alike = defaultdict(list)  # of all layers: a wrong gradient of one is wrong for their sum
    for name, parameter in stage.named_parameters():
        alike[re.sub(r"\d+", "", name)].append(parameter)
    for parameters in alike.values():
        directions = [
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            for parameter in parameters
        ]
        pairs = [*zip(parameters, directions, strict=True)]
        along = torch.stack([(p.grad * direction).sum() for p, direction in pairs]).sum()
        with torch.no_grad():
            for parameter, direction in pairs:
                parameter += 1e-6 * direction
            above = stage(None, batch)
            for parameter, direction in pairs:
                parameter -= 2e-6 * direction
            below = stage(None, batch)
            for parameter, direction in pairs:
                parameter += 1e-6 * direction
        torch.testing.assert_close((above - below) / 2e-6, along, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_compute_bitwise_what_the_whole_model_computes(family: str) -> None:
    model = replace(FAMILIES[family], hidden_dropout=0.2, attention_dropout=0.1)
    whole = build(model)
    cuts = [
        ModelParts((0,), embedding=True),
        ModelParts(),
        ModelParts((1, 2), head=True),
    ]
    batch = batch_of(model, [[5, 7], [12]])
    x = None
    weights = weights_of(whole)
    for parts in cuts:
        stage = build(model, parts)
        assert set(weights_of(stage)) == set(parameter_shapes(model, parts))
        for name, value in weights_of(stage).items():
            assert torch.equal(value, weights[canonical_name(model, name)])
        x = stage(x, batch)
    assert torch.equal(x, whole(None, batch))


def test_tied_embeddings_are_one_parameter_that_gets_both_gradients() -> None:
    whole = build(GPT)
    assert "lm_head.weight" not in weights_of(whole)
    first = build(GPT, ModelParts((0, 1), embedding=True))
    last = build(GPT, ModelParts((2,), head=True))
    batch = batch_of(GPT, [[8]])
    whole(None, batch).backward()
    last(first(None, batch), batch).backward()
    both = first.embed_tokens.weight.grad + last.lm_head.weight.grad
    assert close(both, whole.embed_tokens.weight.grad)


def test_dropout_follows_step_and_seed_and_stops_in_evaluation() -> None:
    model = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)
    batch = batch_of(model, [[8], [8]])
    stage = build(model, seed=5)
    loss = stage(None, batch)
    assert torch.equal(stage(None, batch), loss)
    assert stage(None, replace(batch, step=1)) != loss
    assert build(model, seed=6)(None, batch) != loss
    assert torch.equal(stage.eval()(None, batch), build(GPT)(None, batch))


def test_a_microbatch_of_one_row_drops_what_the_whole_batch_drops() -> None:
    model = replace(LLAMA, hidden_dropout=0.1, attention_dropout=0.1)
    stage = build(model)
    batch = batch_of(model, [[8], [3, 5]])
    rows = [
        stage(None, Batch(*(v[i : i + 1] for v in list(vars(batch).values())[:6])))
        for i in range(2)
    ]
    assert close(sum(rows), stage(None, batch))


def test_bf16_stays_near_fp64() -> None:
    batch = batch_of(LLAMA, [[16]])
    exact = build(LLAMA)(None, batch)
    rounded = build(LLAMA).bfloat16()(None, batch)
    assert rounded.dtype == torch.float32
    assert abs(rounded - exact) / exact < 0.02
