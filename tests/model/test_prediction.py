from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.description.shape import ModelParts
from fivefold.model.batch import Batch
from fivefold.model.loss import IGNORED
from fivefold.model.prediction import with_mtp_tokens
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, GPT, LLAMA, batch_of, build
from tests.verify.cases import chosen

MODELS = FAMILIES | {
    # The weight of an indexer's loss depends on the length of rows, which documents alone have not.
    "sparse": replace(FAMILIES["sparse"], dsa_indexer_loss_coeff=None),
    "hybrid": replace(FAMILIES["hybrid"], mtp_hybrid_override_pattern="*-"),
    "llama, weights of all": replace(FAMILIES["llama"], mtp_use_repeated_layer=True),
    "hybrid, weights of all": replace(
        FAMILIES["hybrid"], mtp_hybrid_override_pattern="M-", mtp_use_repeated_layer=True
    ),
    "hybrid, layers alike": replace(FAMILIES["hybrid"], mtp_hybrid_override_pattern="MM*M"),
    "llama tied": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "gpt untied": replace(GPT, untie_embeddings_and_output_weights=True),
}
FACTOR = 0.3


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-12 * b.abs().max())


def predicting(model: ModelConfig, depths: int) -> ModelConfig:
    return replace(model, mtp_num_layers=depths)


def norm(stage: Stage, name: str, x: Tensor) -> Tensor:
    """A norm as its paper defines it."""
    weights = dict(stage.named_parameters())
    if stage.model.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    scaled = x * (x.square().mean(-1, keepdim=True) + stage.model.norm_epsilon).rsqrt()
    if stage.model.norm_elementwise_affine:
        scaled = scaled * (stage.model.apply_layernorm_1p + weights[f"{name}.weight"])
    return scaled + weights[f"{name}.bias"] if f"{name}.bias" in weights else scaled


@lru_cache(8)
def layers_alone(stage: Stage, names: tuple[str, ...]) -> tuple[Stage, dict[str, Tensor]]:
    """A stage that has nothing but the named layers, and their weights by its names."""
    model = replace(stage.model.without_predictions, num_layers=len(names))
    if model.hybrid_override_pattern is not None:
        pattern = model.hybrid_override_pattern
        if names[0].startswith("mtp."):
            pattern = stage.model.mtp_hybrid_override_pattern
        model = replace(model, hybrid_override_pattern=pattern)
    if names[0].startswith("mtp.") and model.keys_as_values:  # as the last layer, has no window
        model = replace(model, window_size=None, window_attn_skip_freq=None)
    middle = Stage(model, ModelParts(tuple(range(len(names)))), stage.settings)
    weights = dict(stage.named_parameters())
    own = {
        key: weights[f"{name}.{key.split('.', 2)[2]}"]
        for place, name in enumerate(names)
        for key in dict(middle.named_parameters())
        if key.startswith(f"layers.{place}.")
    }
    return middle, own


def layers(stage: Stage, x: Tensor, names: list[str], batch: Batch) -> Tensor:
    """The named layers alone."""
    middle, own = layers_alone(stage, tuple(names))
    whole: Tensor = torch.func.functional_call(middle, own, (x, batch))
    return whole


def document_losses(stage: Stage, tokens: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Summed loss of each depth, of one document by itself: the equations, token by token."""
    model, length = stage.model, len(tokens)
    place = torch.arange(length)[None]
    batch = Batch(tokens[None], labels[None], place, None, place)
    held = dict(stage.named_parameters())
    weight: Tensor = held["embed_tokens.weight"]
    table = weight * model.embedding_multiplier
    x = table[tokens]
    if model.position_embedding_type == "learned_absolute":
        x = x + held["embed_positions.weight"][model.position_embedding_offset :][:length]
    if model.embed_layernorm:
        x = norm(stage, "embed_norm", x)
    x = layers(stage, x, [f"layers.{i}" for i in range(model.num_layers)], batch)
    tied = not model.untie_embeddings_and_output_weights
    output = weight if tied else held["lm_head.weight"]
    bias = held["lm_head.bias"] if model.lm_head_bias else x.new_zeros(len(output))
    states = [norm(stage, "norm", x)]
    for depth in range(1, model.mtp_num_layers + 1):
        name = "mtp.0" if model.mtp_use_repeated_layer else f"mtp.{depth - 1}"
        following = torch.stack([table[tokens[min(t + depth, length - 1)]] for t in range(length)])
        both = [norm(stage, f"{name}.enorm", following), norm(stage, f"{name}.hnorm", states[-1])]
        projection = held[f"{name}.eh_proj.weight"]
        pattern = model.mtp_hybrid_override_pattern
        names = [f"{name}.layer"]
        if pattern is not None:
            names = [f"{name}.layer.{place}" for place in range(len(pattern))]
        made = layers(stage, torch.cat(both, 1) @ projection.t(), names, batch)
        states.append(norm(stage, f"{name}.norm", made))
    losses = [x.new_zeros(()) for _ in states]
    for depth, state in enumerate(states):
        logits = state @ output.t() / model.logits_scaling + bias
        if model.final_logit_softcapping is not None:
            cap = model.final_logit_softcapping
            logits = cap * (logits / cap).tanh()
        log_p = logits[:, : model.vocab_size].log_softmax(-1)
        for t in range(length - depth):
            label = int(labels[t + depth])
            if label != IGNORED:
                losses[depth] = losses[depth] - weights[t + depth] * log_p[t, label]
    return torch.stack(losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen([*product(MODELS, (1, 2))], *product(MODELS, (2,)), *product([*MODELS][::6], (1,))),
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_equations(case: tuple[str, int]) -> None:
    family, depths = case
    options: dict[str, Any] = {"mtp_loss_scaling_factor": FACTOR}
    ours, plain = (build(predicting(MODELS[family], depths), **options) for _ in range(2))
    lengths = [[4, 1, 5], [10]]
    batch = batch_of(ours.model, lengths)
    assert batch.loss_weights is not None
    losses = ours(None, with_mtp_tokens(batch, depths))
    expected = torch.stack(
        [
            document_losses(plain, *parts)
            for row, of_row in enumerate(lengths)
            for parts in zip(
                *(x[row].split(of_row) for x in (batch.tokens, batch.labels, batch.loss_weights)),
                strict=True,
            )
        ]
    ).sum(0)
    assert close(losses, expected)
    scale = torch.tensor([1 / 20, 1 / 16, 1 / 13][: depths + 1], dtype=torch.float64)
    ours.objective(losses * scale).backward()
    weighted = expected * scale
    (weighted[0] + FACTOR / depths * weighted[1:].sum()).backward()
    grads = [torch.cat([p.grad.flatten() for p in s.parameters()]) for s in (ours, plain)]
    assert close(*grads)


def test_what_is_moved_up_stays_in_its_document() -> None:
    batch = batch_of(LLAMA, [[3, 1, 4], [8]])
    batch = replace(batch, labels=torch.arange(16).view(2, 8), tokens=torch.arange(16).view(2, 8))
    further = with_mtp_tokens(batch, 2)
    assert further.mtp_labels is not None and further.mtp_tokens is not None
    assert further.mtp_labels.tolist() == [
        [[1, 2, -100, -100, 5, 6, 7, -100], [9, 10, 11, 12, 13, 14, 15, -100]],
        [[2, -100, -100, -100, 6, 7, -100, -100], [10, 11, 12, 13, 14, 15, -100, -100]],
    ]
    assert further.mtp_tokens[0].tolist()[0] == [1, 2, 0, 0, 5, 6, 7, 0]
    short = with_mtp_tokens(replace(batch, documents=None), 9)
    assert short.mtp_labels is not None
    assert short.mtp_labels[6, 0].tolist() == [7] + [-100] * 7
    assert bool((short.mtp_labels[8] == -100).all())


def test_states_pass_a_stage_with_the_head_alone() -> None:
    """In training each depth's; in an evaluation only the model's own."""
    model = predicting(LLAMA, 2)
    whole = build(model)
    first = ModelParts((0, 1), embedding=True)
    middle = ModelParts((2,), mtp=2)
    last = ModelParts(head=True)
    stages = [build(model, parts) for parts in (first, middle, last)]
    plain = batch_of(model, [[5, 7], [12]])
    for batch, states in ((with_mtp_tokens(plain, 2), 3), (plain, 1)):
        x = stages[0](None, batch)
        assert x.shape == (24, 32)
        x = stages[1](x, batch)
        assert x.shape == (states * 24, 32)
        assert torch.equal(stages[2](x, batch), whole(None, batch))
    assert whole(None, plain).dim() == 0
    without = build(replace(model, mtp_num_layers=0))
    assert torch.equal(without(None, plain), whole(None, plain))
    assert torch.equal(without.logits(plain), whole.logits(plain))
