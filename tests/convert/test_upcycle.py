"""Models with experts that start from dense ones compute what these compute, in any layout."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.cli.main import main
from fivefold.config.model import ModelConfig
from fivefold.config.upcycling import dense_model
from fivefold.convert.upcycle import Fill, upcycled
from fivefold.description.shape import parameter_shapes
from fivefold.mesh.slices import Piece, piece_of
from fivefold.model.init import init_slice
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, batch_of, build

GATED = replace(
    FAMILIES["llama"], num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=24, ffn_hidden_size=24
)
SQUARED = replace(
    FAMILIES["gpt"],
    **{"activation_func": "squared_relu", "gated_linear_unit": False, "add_bias_linear": True},
    **{"num_experts": 8, "moe_ffn_hidden_size": 12, "ffn_hidden_size": None},
)
SIGMOID: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
}
EXACT: dict[str, tuple[ModelConfig, int]] = {
    "whole copies": (GATED, 1),
    "one expert a token": (replace(GATED, moe_router_topk=1), 1),
    "some dense layers": (replace(GATED, moe_layer_freq="[0,1,0]"), 1),
    "numbers of layers": (replace(GATED, layer_scalar=0.75), 1),
    "MTP": (replace(GATED, mtp_num_layers=1), 1),
    "all experts before the softmax": (
        replace(GATED, moe_router_topk=6, moe_router_pre_softmax=True, activation_func="silu"),
        1,
    ),
    "two parts": (replace(SQUARED, moe_router_topk=4), 2),
    "four parts": (replace(SQUARED, moe_router_topk=4), 4),
    "one mixer a layer": (
        replace(
            FAMILIES["hybrid"],
            hybrid_override_pattern="M*E",
            **{"num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 12},
        ),
        2,
    ),
    "scaled shares": (replace(SQUARED, moe_router_topk=4, **SIGMOID), 2),
}
"""Layers whose experts add up to the MLP whatever the router says."""


def weights_of(stage: Stage) -> dict[str, Tensor]:
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def filled_from(weights: Mapping[str, Tensor]) -> Fill:
    def fill(pieces: Mapping[str, Piece]) -> None:
        for name, piece in pieces.items():
            assert piece.shape == weights[name].shape, name
            piece.local.copy_(weights[name][piece.slices])

    return fill


@cache
def both(model: ModelConfig, granularity: int) -> tuple[Stage, Stage]:
    """A dense model with biases, and the one with experts that starts from it."""
    dense, mixture = build(dense_model(model, granularity)), build(model)
    generator = torch.Generator().manual_seed(7)
    for name, tensor in weights_of(dense).items():
        if name.endswith(("bias", "layer_scalar")):
            tensor.normal_(0, 0.3, generator=generator)
    for tensor in weights_of(mixture).values():
        tensor.fill_(float("nan"))
    fill = upcycled(model, granularity, 5, filled_from(weights_of(dense)))
    fill({name: piece_of(tensor) for name, tensor in weights_of(mixture).items()})
    return dense, mixture


@pytest.mark.parametrize("name", EXACT)
def test_experts_add_up_to_the_mlp(name: str) -> None:
    model, granularity = EXACT[name]
    dense, mixture = both(model, granularity)
    batch = batch_of(model, [[5, 1, 6], [12]])
    one, other = (stage.logits(batch)[:, : model.vocab_size] for stage in (dense, mixture))
    assert (one - other).abs().max() <= 1e-12 * one.abs().max()


@pytest.mark.parametrize("activation", ["silu", "gelu", "squared_relu"])
@pytest.mark.parametrize("pre_softmax", [False, True])
def test_weights_are_those_of_the_paper(activation: str, pre_softmax: bool) -> None:
    """Scales and order of He et al., 2024, as Megatron-LM has them."""
    gated, parts, experts, topk = activation == "silu", 4, 8, 2
    model = replace(
        SQUARED,
        activation_func=activation,
        gated_linear_unit=gated,
        add_bias_linear=False,
        moe_router_topk=topk,
        moe_router_pre_softmax=pre_softmax,
    )
    dense, mixture = (weights_of(stage) for stage in both(model, parts))
    copies = experts // parts
    factor = copies * parts * parts / topk if pre_softmax else parts
    factor **= 1 / 2 if activation == "gelu" else 1 / 3
    layer = "layers.1.mlp"
    for projection, dim in (("gate", 0), ("up", 0), ("down", 1))[0 if gated else 1 :]:
        whole = dense[f"{layer}.{projection}_proj.weight"] * factor
        expected = torch.stack([*whole.chunk(parts, dim)] * copies)
        there = mixture[f"{layer}.experts.{projection}_proj.weight"]
        torch.testing.assert_close(there, expected, rtol=1e-15, atol=0)
    name = f"{layer}.router.weight"
    drawn = init_slice(name, mixture[name].shape, [slice(None)] * 2, model, 5)[:copies]
    assert torch.equal(mixture[name], drawn.double().repeat_interleave(parts, dim=0))


@settings(max_examples=50)
@given(data=st.data(), name=st.sampled_from(sorted(EXACT)))
def test_every_slice_is_a_slice_of_the_whole(data: st.DataObject, name: str) -> None:
    """However experts, their rows and columns are split over ranks."""
    model, granularity = EXACT[name]
    weights, whole = (weights_of(stage) for stage in both(model, granularity))
    pieces = {}
    for tensor, shape in parameter_shapes(model).items():
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
        slices = tuple(slice(first, last) for first, last in ends)
        local = torch.full([last - first for first, last in ends], float("nan"), dtype=torch.double)
        pieces[tensor] = Piece(local, torch.Size(shape), slices)
    upcycled(model, granularity, 5, filled_from(weights))(pieces)
    for tensor, piece in pieces.items():
        assert torch.equal(piece.local, whole[tensor][piece.slices]), tensor


COMMON = "--seq-length 16 --global-batch-size 4 --fp64 --lr 0.01 --lr-decay-style constant"
MIXTURE = "--num-experts 4 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-use-upcycling"
PARTS = "--moe-upcycling-granularity 2 --moe-router-pre-softmax"
LAYOUTS = (
    "",
    "--nproc 2 --tp 2 --sequence-parallel --ep 2 --etp 1",
    "--nproc 2 --pp 2 --micro-batch-size 1",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("upcycling") / "base"
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=512, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    ).save_pretrained(folder)
    return folder


def train(base: Path, run: Path, words: str, steps: int) -> int:
    fixed = f"train debug --model {base} {COMMON} --train-iters {steps} --save {run}"
    return main([*fixed.split(), *words.split()])


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]


@pytest.mark.slow
def test_runs_start_alike_in_every_layout_and_go_on(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[list[float]] = []
    for layout in LAYOUTS:
        run = tmp_path / f"mixture-{len(found)}"
        assert train(base, run, f"--load {base} {MIXTURE} {PARTS} {layout}", 2) == 0
        found.append(losses(run))
        assert "4 experts start as 2 parts of the MLP" in capfd.readouterr().out
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-12)
    again = tmp_path / "mixture-0"  # goes on from its own checkpoint
    assert train(base, again, f"--load {base} {MIXTURE} {PARTS}", 3) == 0
    assert losses(again)[:2] == found[0] and len(losses(again)) == 3


@pytest.mark.slow
def test_a_run_of_a_dense_model_is_taken_too(base: Path, tmp_path: Path) -> None:
    copies = "--num-experts 4 --moe-router-topk 2 --moe-use-upcycling"
    assert train(base, tmp_path / "dense", f"--load {base}", 2) == 0
    taken = f"--load {tmp_path}/dense"
    assert train(base, tmp_path / "again", f"{taken} --finetune", 1) == 0
    assert train(base, tmp_path / "mixture", f"{taken} {copies} --nproc 2 --ep 2", 1) == 0
    (again,), (mixture,) = losses(tmp_path / "again"), losses(tmp_path / "mixture")
    assert mixture == pytest.approx(again, rel=1e-12)
    assert again != losses(tmp_path / "dense")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        ("--moe-ffn-hidden-size 20", r"ffn_hidden_size: 20, there 48"),
        ("--num-layers 3", r"num_layers: 3, there 2"),
    ],
)
def test_another_dense_model_is_refused(
    base: Path, tmp_path: Path, words: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = f"--num-experts 4 --moe-use-upcycling --load {base}"
    assert train(base, tmp_path / "run", f"{whole} {words}", 1) == 2
    assert said in capfd.readouterr().err
