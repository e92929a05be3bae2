"""Compiled layers compute what one device computes, whatever is installed in and around them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import Pool
from tests.verify.cases import MODELS, chosen, config, flags, shared_groups, verify_in_pool

COMPILED = {"compile": True, "compile_backend": "aot_eager"}
FULL = {"recompute_granularity": "full"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "nothing installed": (1, "llama", flags()),
    "dropout, ZeRO-3, recomputed": (2, "gpt", flags(strategy="optim_grads_params") | FULL),
    "tensor parallel, deferred weights": (
        4,
        "llama tied",
        flags(tp=2, pp=2, stages="Ett|tttmL", sequence=True)
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1, "mtp_num_layers": 1},
    ),
    "latents, sequence parallel, ring": (
        4,
        "latent",
        flags(tp=2, sequence=True) | {"context_parallel_size": 2, "cp_comm_type": ("p2p",)},
    ),
    "tensor parallel, deferred weights, ZeRO-1": (
        8,
        "llama tied",
        flags(tp=2, pp=2, stages="Ett|tttL", sequence=True, strategy="optim")
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(CASES, "dropout, ZeRO-3, recomputed", "tensor parallel, deferred weights"),
)
def test_compiled_layers_are_exact(case: str) -> None:
    world, model, settings = CASES[case]
    report = verify_in_pool(world, config(MODELS[model], world, **settings, **COMPILED))
    assert report.passed, report.text()


@pytest.mark.parametrize(
    "memory",
    [
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
        {"fine_grained_activation_offloading": True, "offload_modules": ("mlp_norm",)},
    ],
)
def test_hooks_inside_of_compiled_layers_are_refused(memory: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="compiled layers cannot recompute or offload mlp"):
        check(config(MODELS["llama"], **memory | COMPILED), 1)


def _graphs(rank: int, world_size: int, settings: Config) -> int:
    """Number of graphs that a step compiles."""
    torch.compiler.reset()
    counters.clear()
    with shared_groups():
        engine = Engine(check(settings, world_size), rank, torch.device("cpu"))
        rows = slice(0, settings.training.global_batch_size)
        engine.gradients(microbatches(settings, global_batch(settings, 0), rows))
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "dropout"), [(1, 0.1), (2, 0.0)])
def test_a_layer_is_compiled_once(tp: int, dropout: float, pool: Pool) -> None:
    rates = {"hidden_dropout": dropout, "attention_dropout": dropout}
    model = replace(MODELS["llama"], window_size=3)
    few, many = (
        config(replace(model, num_layers=layers), **flags(tp=tp), **COMPILED, **rates)
        for layers in (2, 12)  # more than torch compiles before it gives up
    )
    assert pool.run(tp, _graphs, many)[0] == pool.run(tp, _graphs, few)[0] > 0
