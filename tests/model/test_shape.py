from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.config.reach import Reach
from fivefold.description.layers import describe_layer
from fivefold.description.linear_attention import Recurrence
from fivefold.description.shape import (
    ModelParts,
    count_parameters,
    forward_flops,
    layer_weights,
    parameter_shapes,
    stage_weights,
    training_flops,
)
from fivefold.model.attention.blocks import DocumentMask
from fivefold.model.attention.grouped_query import AttentionBlock
from fivefold.model.linear_attention.state_layer import StateLayer
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, GPT, LLAMA, SPARSE, TO_ALL, batch_of
from tests.model.plain_attention import plain_attention

PARTS = {
    "whole": None,
    "first": ModelParts((0, 1), embedding=True),
    "middle": ModelParts((1,)),
    "last": ModelParts((2,), head=True),
    "ends": ModelParts(embedding=True, head=True),
}
MODELS = FAMILIES | {"tied": replace(LLAMA, untie_embeddings_and_output_weights=False)}
MTP = {
    "whole": None,
    "with the head": ModelParts((2,), head=True, mtp=2),
    "before the head": ModelParts(mtp=2),
    "with the embedding": ModelParts((0,), embedding=True, mtp=2),
    "head": ModelParts(head=True),
}


def shapes_of(model: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    return {name: weight.shape for name, weight in layer_weights(model, layer).items()}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_modules(model: ModelConfig, parts: ModelParts | None) -> None:
    _are_those_of_the_modules(model, parts)


@pytest.mark.parametrize("parts", MTP.values(), ids=MTP)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_so_are_those_of_further_predictions(model: ModelConfig, parts: ModelParts | None) -> None:
    _are_those_of_the_modules(replace(model, mtp_num_layers=2), parts)


def _are_those_of_the_modules(model: ModelConfig, parts: ModelParts | None) -> None:
    with torch.device("meta"):
        stage = Stage(model, parts)
    actual = {name: tuple(p.shape) for name, p in stage.named_parameters()}
    assert parameter_shapes(model, parts) == actual
    total = sum(p.numel() for p in stage.parameters())
    assert count_parameters(model, parts).total == total


def test_large_presets_are_counted_as_built() -> None:
    with torch.device("meta"):
        built = Stage(PRESETS["llama3-405b"])
    counted = count_parameters(PRESETS["llama3-405b"])
    assert counted.total == sum(p.numel() for p in built.parameters())


def test_padding_is_counted_once_per_vocabulary_matrix() -> None:
    padding = (128 - 100) * 32
    for model, matrices in ((LLAMA, 2), (GPT, 1)):
        padded = count_parameters(model).total
        assert padded - count_parameters(model, padded=False).total == matrices * padding


@pytest.mark.parametrize("model", TO_ALL.values(), ids=TO_ALL)
def test_flops_are_those_that_pytorch_counts(model: ModelConfig) -> None:
    stage = Stage(model)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter)
    for layer in stage.layers.values():
        if layer.self_attn is None:
            continue
        softmax = isinstance(layer.self_attn, AttentionBlock)
        # Two matrix products, which the counter sees; or none.
        layer.self_attn.kernel = plain_attention if softmax else _without_states
    batch = batch_of(model, [[16], [16]])
    with FlopCounterMode(display=False) as forward:
        loss = stage(None, batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    tokens = batch.tokens.numel()
    linear = filter(model.is_linear, range(model.num_layers))
    states = sum(describe_layer(model, layer).one(Recurrence).flops for layer in linear)
    assert forward.get_total_flops() == tokens * (
        forward_flops(model, 16, causal=False).total - states
    )
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == tokens * (training_flops(model, 16, causal=False).total - 3 * states)


def _without_states(mixed: Tensor, rates: Tensor, layer: StateLayer, _: object) -> Tensor:
    """As many features as a state gives, in place of what it gives."""
    return mixed[..., 2 * layer.group.key :] * rates.mean()


def test_flops_of_stages_add_up_and_causal_attention_is_half() -> None:
    cuts = [ModelParts((0, 1), embedding=True), ModelParts((2,), head=True)]
    whole = training_flops(LLAMA, 64)
    assert sum(training_flops(LLAMA, 64, parts).total for parts in cuts) == whole.total
    assert 2 * whole.attention == training_flops(LLAMA, 64, causal=False).attention


def test_flops_of_a_window_are_those_of_the_pairs_in_it() -> None:
    windowed = replace(LLAMA, window_size=100)
    pairs = DocumentMask((0, 4096), window=100).area((0, 4096)) / 4096
    ratio = forward_flops(windowed, 4096).attention / forward_flops(LLAMA, 4096).attention
    assert ratio == pytest.approx(pairs / 2048, rel=0.02)
    assert forward_flops(replace(LLAMA, window_size=9000), 4096) == forward_flops(LLAMA, 4096)


@pytest.mark.parametrize("chunk", [1, 7, 1000, 4096, 9000])
def test_flops_of_chunks_are_those_of_the_pairs_in_them(chunk: int) -> None:
    """Half a key a query fewer, as everywhere: of itself it sees a half."""
    reach = Reach(chunk=chunk)
    area = DocumentMask.of((0, 500, 4596), reach).area((500, 4596))
    assert area / 4096 == pytest.approx(reach.mean_keys(4096) + 0.5)
    chunked = replace(LLAMA, attention_chunk_size=chunk, no_rope_freq="[0,1,0]")
    ratio = forward_flops(chunked, 4096).attention / forward_flops(LLAMA, 4096).attention
    assert ratio == pytest.approx((1 + 2 * reach.mean_keys(4096) / 2048) / 3, rel=1e-4)


def test_flops_of_chosen_tokens_are_those_of_the_pairs_and_of_all_scores() -> None:
    model = replace(SPARSE, dsa_indexer_topk=1600)
    shape, heads = model.indexer, 2 * (model.q_size + model.attention_size)
    pairs = sum(min(s + 1, 1600) for s in range(6400)) / 6400
    of_index = 3 * 2 * shape.heads * (shape.dim + 1) * 3200
    found = forward_flops(model, 6400).attention
    assert found == pytest.approx(3 * heads * pairs + of_index, rel=1e-3)
    taught, fixed = (
        training_flops(replace(model, dsa_indexer_loss_coeff=c), 6400) for c in (0.1, None)
    )
    assert taught.attention == 3 * found
    assert taught.attention - fixed.attention == 2 * of_index
    to_all = replace(model, dsa_indexer_topk=6400)
    assert forward_flops(to_all, 6400).attention == 3 * heads * 3200 + of_index


def test_training_flops_of_a_published_model() -> None:
    flops = training_flops(PRESETS["llama3-8b"], 8192)
    assert flops.matmul == 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert flops.attention == 32 * 3 * 8192 * 32 * 256


DEEPSEEK = replace(
    PRESETS["deepseek-v3"],
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=96,
    vocab_size=256,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=48,
    moe_layer_freq="[0]*1+[1]*3",
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=12,
)


def test_shapes_of_latent_attention_and_experts() -> None:
    attention = {
        "self_attn.q_a_proj.weight": (32, 64),
        "self_attn.q_a_layernorm.weight": (32,),
        "self_attn.q_b_proj.weight": (4 * 12, 32),
        "self_attn.kv_a_proj.weight": (16 + 4, 64),
        "self_attn.kv_a_layernorm.weight": (16,),
        "self_attn.kv_b_proj.weight": (4 * (8 + 12), 16),
        "self_attn.o_proj.weight": (64, 4 * 12),
    }
    dense, sparse = shapes_of(DEEPSEEK, 0), shapes_of(DEEPSEEK, 1)
    assert {n: s for n, s in dense.items() if "attn." in n} == attention
    assert {n: s for n, s in sparse.items() if "attn." in n} == attention
    assert dense["mlp.down_proj.weight"] == (64, 96)
    assert {n: s for n, s in sparse.items() if n.startswith("mlp.")} == {
        "mlp.router.weight": (8, 64),
        "mlp.experts.gate_proj.weight": (8, 24, 64),
        "mlp.experts.up_proj.weight": (8, 24, 64),
        "mlp.experts.down_proj.weight": (8, 64, 24),
        "mlp.shared_experts.gate_proj.weight": (48, 64),
        "mlp.shared_experts.up_proj.weight": (48, 64),
        "mlp.shared_experts.down_proj.weight": (64, 48),
    }
    uncompressed = shapes_of(replace(DEEPSEEK, q_lora_rank=None), 0)
    assert uncompressed["self_attn.q_proj.weight"] == (4 * 12, 64)


@pytest.mark.parametrize("tied", [False, True])
def test_counts_of_sparse_stages_are_those_of_their_shapes(tied: bool) -> None:
    model = replace(DEEPSEEK, untie_embeddings_and_output_weights=not tied)
    cuts = [ModelParts((0, 1), embedding=True), ModelParts((2, 3), head=True, mtp=1)]
    for parts in (None, *cuts):
        shapes = parameter_shapes(model, parts)
        assert count_parameters(model, parts).total == sum(map(prod, shapes.values()))
    last = parameter_shapes(model, cuts[1])
    assert ("mtp_embed_tokens.weight" in last) is not tied  # the tied output weight is a copy of it
    assert last["mtp.0.eh_proj.weight"] == (64, 128)
    assert last["mtp.0.layer.mlp.router.weight"] == (8, 64)
    whole = training_flops(model, 64)
    assert sum(training_flops(model, 64, parts).total for parts in cuts) == whole.total


def test_flops_are_those_of_the_experts_that_a_token_is_sent_to() -> None:
    attention = 64 * 32 + 32 * 48 + 64 * 20 + 16 * 80 + 48 * 64
    sparse = attention + 64 * 8 + 3 * 64 * (2 * 24 + 48)
    weights = attention + 3 * 64 * 96 + 3 * sparse  # one dense layer, three with experts
    weights += sparse + 2 * 64 * 64 + 2 * 256 * 64  # prediction, and the output layer twice
    flops = forward_flops(DEEPSEEK, 64)
    assert flops.matmul == 2 * weights
    assert flops.attention == 5 * 64 * 4 * (12 + 12)
    biased = replace(DEEPSEEK, add_bias_linear=True)
    assert forward_flops(biased, 64) == flops


def test_training_flops_of_deepseek_v3_are_six_times_its_active_weights() -> None:
    model = replace(PRESETS["deepseek-v3"], mtp_num_layers=0)
    count = count_parameters(model, active=True)
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    assert training_flops(model, 4096).matmul == 6 * (count.total - count.embedding - norms)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.1.self_attn.q_a_proj.weight", (32, 64)),
        ("layers.1.self_attn.q_b_proj.weight", (24, 32)),
        ("layers.1.self_attn.kv_a_proj.weight", (20, 64)),
        ("layers.1.self_attn.kv_b_proj.weight", (40, 16)),
        ("layers.1.self_attn.o_proj.weight", (64, 24)),
        ("layers.1.input_layernorm.weight", (64,)),
        ("layers.0.mlp.down_proj.weight", (64, 48)),
        ("layers.1.mlp.router.weight", (8, 64)),
        ("layers.1.mlp.experts.up_proj.weight", (2, 8, 64)),
        ("layers.1.mlp.experts.down_proj.weight", (2, 64, 8)),
        ("layers.1.mlp.shared_experts.up_proj.weight", (24, 64)),
        ("mtp.0.eh_proj.weight", (32, 128)),
        ("mtp.0.layer.mlp.experts.gate_proj.weight", (2, 8, 64)),
        ("lm_head.weight", (128, 64)),
    ],
)
def test_what_a_rank_holds(name: str, expected: tuple[int, ...]) -> None:
    assert stage_weights(DEEPSEEK)[name].local(tp=2, ep=4, etp=3) == expected


def test_biases_of_experts_are_split_with_their_rows() -> None:
    biased = replace(DEEPSEEK, add_bias_linear=True)
    split = {
        name: weight.local(tp=2, ep=4, etp=3)
        for name, weight in layer_weights(biased, 1).items()
        if name.endswith("bias") and "mlp" in name
    }
    assert split == {
        "mlp.router.bias": (8,),
        "mlp.experts.gate_proj.bias": (2, 8),
        "mlp.experts.up_proj.bias": (2, 8),
        "mlp.experts.down_proj.bias": (2, 64),
        "mlp.shared_experts.gate_proj.bias": (24,),
        "mlp.shared_experts.up_proj.bias": (24,),
        "mlp.shared_experts.down_proj.bias": (64,),
    }
