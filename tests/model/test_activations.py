from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig, RecomputeModule
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.description.activations import (
    Saved,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.description.expert_rows import LayerRows
from fivefold.description.running import Running
from fivefold.description.shape import ModelParts
from fivefold.model.layer import TransformerLayer
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, LLAMA, batch_of


def kept(model: ModelConfig, running: Running, layer: int = 0) -> float:
    return total(saved_activations(model, layer, running)).kept


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        FAMILIES["qwen"],
        replace(LLAMA, hidden_dropout=0.1),
        replace(LLAMA, activation_func="gelu"),
        replace(LLAMA, activation_func="quick_gelu", gated_linear_unit=False),
        replace(LLAMA, activation_func="relu", gated_linear_unit=False),
        replace(LLAMA, activation_func="squared_relu", gated_linear_unit=False),
        replace(LLAMA, activation_func="xielu", gated_linear_unit=False),
    ],
    ids=["l", "q", "drop", "geglu", "quick", "relu", "squared", "xielu"],
)
def test_activation_bytes_are_what_a_layer_saves(model: ModelConfig) -> None:
    stage = Stage(model)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter)
    batch = batch_of(model, [[64]])
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def spy(layer: TransformerLayer, arguments: tuple) -> None:
        tables = [x for each in arguments[1].rotary.values() for x in (each.cos, each.sin)]
        known.update(table.untyped_storage().data_ptr() for table in tables)

    known = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    known.add(batch.token_ids.untyped_storage().data_ptr())
    for layer in stage.layers.values():
        layer.register_forward_pre_hook(spy)
    x = torch.randn(64, model.hidden_size, requires_grad=True)
    middle = Stage(model, ModelParts((0,)))
    middle.layers["0"] = stage.layers["0"]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        middle(x, batch)
    measured = sum(
        t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in known
    )
    running = Running(64, element_bytes=4, input_bytes=4, others=False)
    norms = 2 * (model.norms_before + model.norms_after)
    scales_of_norms = 64 * 4 * (norms + (6 if model.qk_layernorm else 0))
    keys_of_masks = 2 * 8 if model.hidden_dropout else 0
    assert measured == 64 * kept(model, running) + scales_of_norms + keys_of_masks


def test_activation_bytes_follow_the_published_formula() -> None:
    model = PRESETS["llama3-8b"]
    h, a, k, d, f, t = 4096, 32, 8, 128, 14336, 8
    inside = 4 * d * (a + k) + 4 * a + 6 * f
    assert kept(model, Running(8192)) == 8 * h + inside
    assert kept(model, Running(8192, tensor_parallel=t)) == 8 * h + inside / t
    with_sp = Running(8192, tensor_parallel=t, sequence_parallel=True)
    assert kept(model, with_sp) == (8 * h + inside) / t


H, A, S = 1024, 16, 2048
GPT3 = replace(
    PRESETS["gpt3-175b"], num_layers=4, hidden_size=H, num_attention_heads=A, vocab_size=51200
)
SELECTIVE = MemoryConfig(recompute_granularity="selective")
FULL = MemoryConfig(recompute_granularity="full")


def test_korthikanti_s_table_comes_out() -> None:
    """Table 2 of the paper, bytes per token: s b h x (...) over s b."""
    t, scores = 8, 5 * A * S / H
    whole = Running(S, fused_attention=False)
    split = replace(whole, tensor_parallel=t)
    parts = replace(split, sequence_parallel=True)
    assert kept(GPT3, whole) == H * (34 + scores)
    assert kept(GPT3, split) == H * (10 + 24 / t + scores / t)
    assert kept(GPT3, parts) == H / t * (34 + scores)
    assert kept(GPT3, replace(parts, memory=SELECTIVE)) == H * 34 / t
    assert kept(GPT3, replace(whole, memory=FULL)) == 2 * H
    assert kept(GPT3, replace(split, memory=FULL)) == 2 * H
    assert kept(GPT3, replace(parts, memory=FULL)) == 2 * H / t


def test_sequence_parallelism_saves_47_percent_where_tensor_parallelism_is_4() -> None:
    without = Running(S, tensor_parallel=4, fused_attention=False, memory=SELECTIVE)
    with_it = replace(without, sequence_parallel=True)
    assert 1 - kept(GPT3, with_it) / kept(GPT3, without) == pytest.approx(0.47, abs=0.005)


@pytest.mark.parametrize(("dropout", "scores"), [(0.0, 2 * A * S), (0.1, 5 * A * S)])
def test_a_fused_kernel_keeps_one_number_a_head(dropout: float, scores: int) -> None:
    model = replace(GPT3, attention_dropout=dropout)
    for fused, expected in ((True, 4 * A), (False, scores)):
        running = Running(S, fused_attention=fused)
        assert saved_activations(model, 0, running)["attn_scores"].kept == expected


def test_a_layer_of_experts_keeps_a_row_for_each_copy_of_a_token() -> None:
    model = PRESETS["mixtral-8x7b"]
    h, f, k, t, e = 4096, 14336, 2, 4, 8
    attention = 8 * h + 4 * (4096 + 1024) + 4 * 32
    # Logits and the chosen scores in fp32; numbers of experts, and of their rows, in int64.
    routing = 4 * (e + k) + 8 * k + 8 * k
    row = 2 * h + 6 * f + 4
    assert kept(model, Running(4096)) == attention + routing + k * row
    split = Running(4096, tensor_parallel=t, sequence_parallel=True)
    assert kept(model, split) == (attention + routing + k * row) / t
    # Ranks that split experts share their rows.
    folded = replace(split, expert_tensor_parallel=t)
    expected = (attention + routing) / t + k * (2 * h + 6 * f / t + 4 + 8)
    assert kept(model, folded) == pytest.approx(expected, rel=1e-12)


def test_rows_are_expected_by_what_a_dispatcher_sends() -> None:
    model = PRESETS["mixtral-8x7b"]
    ways = {"alltoall": 8 * 2 + 8 * 2, "allgather": 4 * 8 * 2}
    reached = 1 - (6 * 5) / (8 * 7)  # that one of a token's two experts is among two of eight
    ways["flex"] = 4 * reached * 8 + 4 * reached * 2 * 8
    for dispatcher, places in ways.items():
        running = Running(4096, expert_parallel=4, dispatcher=dispatcher)
        saved = saved_activations(model, 0, running)
        assert saved["row_places"].kept == pytest.approx(places, rel=1e-12)
        assert saved["expert_fc1"].kept == 2 * 4096 * 2


def test_known_rows_take_the_place_of_expected_ones() -> None:
    model, tokens = PRESETS["mixtral-8x7b"], 64
    rows = LayerRows(sent=10, got=30, stayed=90, computed=120, joined=0)
    running = Running(4096, expert_parallel=2, microbatch_tokens=tokens, routed=rows)
    saved = saved_activations(model, 0, running)
    assert saved["expert_fc1"].kept * tokens == 120 * 2 * 4096
    assert saved["moe_act"].kept * tokens == 120 * 2 * 2 * 14336
    assert saved["row_places"].kept * tokens == 8 * (2 * tokens + 120)
    assert saved["row_sizes"].kept * tokens == 8 * 4


def test_latents_and_shared_experts_are_kept() -> None:
    model = PRESETS["deepseek-v3"]
    h, q, r, a, f, k = 7168, 1536, 512, 128, 2048, 8
    attention = 2 * (2 * h + 2 * q + 2 * r + 2 * a * 192 + 2 * a * 128) + 4 * a
    dense = attention + 4 * h + 6 * 18432
    routing = 4 * (256 + k + 1) + 8 * k + 8 * k + 4 * k
    experts = attention + 4 * h + routing + k * (2 * h + 6 * f) + 6 * f
    assert kept(model, Running(4096), layer=0) == dense
    assert kept(model, Running(4096), layer=3) == experts
    prediction = experts + 2 * 2 * h + 2 * 2 * h
    assert kept(model, Running(4096), layer=61) == prediction


MOE = {"router", "row_weights", "expert_fc1", "moe_act", "expert_fc2"}


@pytest.mark.parametrize(
    ("module", "gone"),
    [
        ("core_attn", {"attn_scores"}),
        ("mlp", set()),
        ("moe", MOE | {"shared_fc2", "shared_act"}),
        ("moe_act", {"expert_fc2"}),
        ("shared_experts", {"shared_fc2", "shared_act"}),
        ("routed_experts", {"moe_act", "expert_fc2"}),
        ("layernorm", {"qkv", "moe_input"}),
        ("mla_up_proj", {"core_attn"}),
    ],
)
def test_what_is_made_again_is_not_kept(module: RecomputeModule, gone: set[str]) -> None:
    model, layer = PRESETS["deepseek-v3"], 3
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=(module,))
    plain = saved_activations(model, layer, Running(4096))
    saved = saved_activations(model, layer, Running(4096, memory=memory))
    assert {name for name, item in saved.items() if item.recomputed} == gone
    assert all(saved[name].recomputed == plain[name].kept for name in gone)
    assert all(saved[name] == plain[name] for name in plain if name not in gone)


def test_dense_layers_make_their_mlp_again() -> None:
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    saved = saved_activations(PRESETS["llama3-8b"], 0, Running(8192, memory=memory))
    assert {name for name, item in saved.items() if item.recomputed} == {"mlp_act", "fc2"}


@pytest.mark.parametrize(
    ("method", "number", "inputs"),
    [("uniform", 1, "1111"), ("uniform", 3, "1001"), ("block", 2, "1100"), ("block", 9, "1111")],
)
def test_full_recomputation_keeps_inputs(method: Any, number: int, inputs: str) -> None:
    memory = MemoryConfig(
        recompute_granularity="full", recompute_method=method, recompute_num_layers=(number,)
    )
    running = Running(S, memory=memory)
    plain = total(saved_activations(GPT3, 0, Running(S))).kept
    for position, has_input in enumerate(inputs):
        saved = total(saved_activations(GPT3, position, running, position=position))
        if method == "block" and has_input == "0":
            assert saved == Saved(kept=plain)
        else:
            assert saved == Saved(kept=2 * H * int(has_input), recomputed=plain)


def test_offloaded_inputs_leave_the_device() -> None:
    model, names = PRESETS["mixtral-8x7b"], ("attn_norm", "core_attn", "attn_proj", "moe_act")
    memory = MemoryConfig(fine_grained_activation_offloading=True, offload_modules=names)
    plain = saved_activations(model, 0, Running(4096))
    moved = saved_activations(model, 0, Running(4096, memory=memory))
    away = {name for name, item in moved.items() if item.offloaded}
    assert away == {*names, "attn_scores", "row_weights"}
    assert all(moved[name].kept == 0 for name in away)
    assert all(moved[name].offloaded == plain[name].kept for name in away)
    assert total(moved).kept + total(moved).offloaded == total(plain).kept


def test_narrow_inputs_are_half_and_leave_a_wide_output_of_attention_beside_them() -> None:
    model = PRESETS["llama3-8b"]
    h, f, a = 4096, 14336, 32
    narrow = 2 * 1 * h + 1 * h + 1 * f  # inputs of qkv and fc1, of the output projection, of fc2
    wide = 2 * 2 * h + 2 * (4096 + 2 * 1024) + 2 * h + 4 * a + 2 * 2 * f
    assert kept(model, Running(8192, input_bytes=1)) == narrow + wide


def test_settings_become_numbers() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(
        tensor_model_parallel_size=8, sequence_parallel=True, fp8_format="hybrid", seq_length=8192
    )
    expected = Running(
        8192,
        2,
        1,
        delayed_scales=True,
        tensor_parallel=8,
        sequence_parallel=True,
        others=False,
        microbatch_tokens=8192,
    )
    assert Running.of(config) == expected
    cut = config.with_values(micro_batch_size=3, context_parallel_size=4, num_sequence_slices=2)
    assert Running.of(cut).microbatch_tokens == 3 * 8192 / 8
    assert Running.of(config.with_values(fp8_format=None)).input_bytes == 2
    assert Running.of(config.with_values(fp4_format="e2m1")).input_bytes == 0.5


def test_logits_are_what_a_loss_keeps_unless_it_is_fused_with_the_output_layer() -> None:
    model, V = PRESETS["llama3-8b"], 128256

    def logits(**memory: Any) -> Saved:
        return loss_bytes(model, Running(8192, tensor_parallel=8, memory=MemoryConfig(**memory)))[
            "logits"
        ]

    fused = {"cross_entropy_loss_fusion": True}
    assert logits() == Saved(kept=2 * V / 8, recomputed=8 * V / 8)
    assert logits(**fused) == Saved(kept=2 * V / 8, recomputed=4 * V / 8)
    assert logits(**fused, cross_entropy_fusion_impl="linear") == Saved(kept=0, recomputed=6 * 3072)
    predicting = replace(model, mtp_num_layers=1)
    assert loss_bytes(predicting, Running(8192))["logits"] == Saved(kept=4 * V, recomputed=8 * V)


def test_the_loss_keeps_what_is_counted() -> None:
    stage = Stage(LLAMA, ModelParts(head=True)).double()
    x = torch.randn(64, LLAMA.hidden_size, dtype=torch.float64, requires_grad=True)
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = batch_of(LLAMA, [[64]])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        stage(x, batch)
    known = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    known.add(batch.token_ids.untyped_storage().data_ptr())
    measured = sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in known)
    predicted = 64 * total(loss_bytes(LLAMA, Running(64, 8, 8))).kept
    labels_weights_and_scales = 64 * (8 + 8 + 8)
    assert measured == predicted + labels_weights_and_scales
