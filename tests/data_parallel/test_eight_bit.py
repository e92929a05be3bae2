"""Weights that are gathered in 8 bits are those that would be narrowed after the gather."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.training import TrainingConfig
from fivefold.description.shape import stage_weights
from fivefold.errors import ConfigError
from fivefold.mesh.slices import local_tensor
from fivefold.model.eight_bit.fp8 import E4M3, RECIPES
from fivefold.model.eight_bit.layers import eight_bit, install_eight_bit, products_of
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.eight_bit.rules import SQUARE, in_eight_bits, num_scales
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.train.engine import Engine
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import MIXTURE, MODELS, chosen, config, flags, named, shared_groups

MIXED = replace(MIXTURE, mtp_num_layers=1, moe_shared_expert_gate=True)
# Blocks of 128 x 128 that end within ranks' rows, and at the edges of weights.
WIDE = replace(
    MODELS["llama"], num_layers=2, hidden_size=136, ffn_hidden_size=300, num_query_groups=2
)
EXPERTS = replace(MIXTURE, hidden_size=136, moe_ffn_hidden_size=200)
ENDS = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2}
ZERO3 = "optim_grads_params"
CASES: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "ZeRO-1, by tensor": (2, MODELS["llama tied"], "tensorwise", flags(strategy="optim")),
    "ZeRO-3, tp, experts, scales of earlier steps": (
        4,
        MIXED,
        "delayed",
        named(ep=2, tp=2, strategy=ZERO3) | {"fp8_amax_history_len": 2},
    ),
    "ZeRO-3, tp, blocks over two ranks": (
        4,
        WIDE,
        "blockwise",
        flags(tp=2, sequence=True, strategy=ZERO3) | {"recompute_granularity": "full"},
    ),
    "experts split between shards": (4, EXPERTS, "blockwise", named(ep=2, strategy=ZERO3)),
    "experts between ends in bf16": (
        2,
        replace(MIXED, **ENDS),
        "delayed",
        named(ep=2, strategy=ZERO3) | {"fp8_amax_history_len": 2},
    ),
    "experts of one shard, two replicas": (
        4,
        MIXED,
        "tensorwise",
        named(ep=2, strategy="optim_grads", replicas=2),
    ),
    "half of the optimizer on the host": (
        2,
        WIDE,
        "blockwise",
        flags(strategy="optim")
        | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
    "experts, optimizer on the host": (
        4,
        MIXED,
        "delayed",
        named(ep=2, strategy=ZERO3) | {"fp8_amax_history_len": 2, "optimizer_cpu_offload": True},
    ),
    "deferred, kept in a node": (
        4,
        WIDE,
        "blockwise",
        flags(dp=4, strategy=ZERO3)
        | {"pipeline_schedule": "zb_h1", "zero_hpz_partition_size": 2, "micro_batch_size": 1},
    ),
    "deferred in a pipeline, kept in a node": (
        8,
        WIDE,
        "blockwise",
        flags(pp=2, dp=4, stages="Et|tL", strategy=ZERO3)
        | {"pipeline_schedule": "zb_h1", "zero_hpz_partition_size": 2, "micro_batch_size": 1},
    ),
}


def _asked(case: str, gathers: bool) -> Config:
    world, model, recipe, settings = CASES[case]
    how = {"precision": "bf16", "fp8_format": "e4m3", "fp8_recipe": recipe}
    return config(model, world, **how | settings, fp8_param_gather=gathers)


@shared_groups()
def _trained(rank: int, world: int, case: str, gathers: bool) -> tuple[list[float], Any, set[str]]:
    """Losses and norms of two steps, this rank's weights after them, and types of whole weights."""
    asked = _asked(case, gathers)
    engine = Engine(check(asked, world), rank, torch.device("cpu"))
    found = []
    for step in range(2):
        result = engine.step(own_batch(engine, step))
        found += [result.loss, result.grad_norm]
    weights = {n: local_tensor(p).float().numpy().copy() for n, p in engine.parameters.items()}
    for stage in engine.model.gradients.values():
        stage.before_run(trains=True)
        stage.unshard()
        stage._finish_gathers()  # type: ignore[union-attr]
    narrow = {n for n, p in engine.model.parameters().items() if p.dtype == E4M3}
    engine.model.reshard()
    return found, weights, narrow


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(CASES, "deferred, kept in a node", "half of the optimizer on the host"),
)
def test_steps_are_the_same_to_the_bit(case: str) -> None:
    world = CASES[case][0]
    wide, narrow = (run(world, _trained, case, gathers) for gathers in (False, True))
    for (numbers, weights, none), (others, after, types) in zip(wide, narrow, strict=True):
        assert numbers == others
        assert not none and types
        assert all((weights[name] == after[name]).all() for name in weights)


@pytest.mark.parametrize("model", [*MODELS.values(), MIXED, replace(MIXED, **ENDS)])
def test_rules_and_layers_name_the_same_weights(model: Any) -> None:
    parts = StageSpec(True, tuple(range(model.num_layers)), True, model.mtp_num_layers)
    with torch.device("meta"):
        stage = Stage(model, parts)
    install_eight_bit(stage, EightBit(RECIPES["tensorwise"], torch.float32), MemoryConfig())
    layers = {f"{name}.weight" for name, m in stage.named_modules() if products_of(m) is not None}
    assert layers == {n for n, w in stage_weights(model, parts).items() if in_eight_bits(n, w)}
    narrow = {name.split(".")[1] for name in layers if name.startswith("layers.")}
    assert narrow == {str(n) for n in range(model.num_layers) if not model.is_wide(n)}


@pytest.mark.parametrize("recipe", SQUARE)
@pytest.mark.parametrize("shape", [(1, 1), (128, 129), (300, 40), (3, 129, 256)])
def test_as_many_scales_are_compared_as_blocks_have(recipe: Any, shape: tuple[int, ...]) -> None:
    whole = torch.zeros(shape).reshape(-1, *shape[-2:])
    products = eight_bit(TrainingConfig(fp8_format="e4m3", fp8_recipe=recipe), torch.float32)
    assert products is not None
    made = sum(products._weight(each).inverse.numel() for each in whole)
    assert num_scales(shape, recipe) == made


def _refusal(world: int, model: Any, **settings: Any) -> str:
    how = {"precision": "bf16", "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    with pytest.raises(ConfigError) as caught:
        check(config(model, world, **how | settings, fp8_param_gather=True), world)
    return str(caught.value)


def test_what_could_not_be_gathered_in_8_bits_is_refused() -> None:
    llama, sharded = MODELS["llama tied"], flags(strategy=ZERO3)
    for recipe in ("rowwise", "mxfp8"):
        said = _refusal(2, llama, **sharded, fp8_recipe=recipe)
        assert "scales its rows, dX its columns" in said and "--fp8-recipe blockwise" in said
    assert "which gathers nothing" in _refusal(2, llama, **flags())
    assert "is a single rank" in _refusal(1, llama, **sharded)
    tiles = {"recompute_granularity": "full", "tiled_mlp_num_shards": 2}
    assert "--tiled-mlp-num-shards 1" in _refusal(2, llama, **sharded, **tiles)
    both = _refusal(2, llama, **sharded, zero_quantized_weights=True)
    assert "works: --no-zero-quantized-weights | --no-fp8-param-gather" in both
    early = flags(strategy="optim") | {"overlap_param_gather_with_optimizer_step": True}
    assert "--no-overlap-param-gather-with-optimizer-step" in _refusal(2, llama, **early)
    off = {"optimizer_cpu_offload": True, "param_cpu_offload": True}
    assert "--no-param-cpu-offload" in _refusal(2, llama, **sharded, **off)
    assert "--no-compile" in _refusal(2, llama, **sharded, compile=True)
    heads = replace(llama, num_query_groups=1)
    split = flags(tp=2, sequence=True, strategy=ZERO3)
    assert "of 1 key/value heads, which tp 2" in _refusal(4, heads, **split)
