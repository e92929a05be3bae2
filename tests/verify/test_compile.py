"""Compiled layers compute what one device computes, whatever is installed in and around them."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fivefold.audit.measure import measured
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.model.attention import grouped_query as attention
from fivefold.model.attention.cuda_kernels import Grads
from fivefold.model.attention.varlen import Pieces
from fivefold.model.batch import on_device
from fivefold.model.compiled import compile_layers
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches
from tests.model.models import batch_of
from tests.pool import Pool
from tests.verify.cases import MODELS, chosen, config, flags, shared_groups, verify_in_pool

COMPILED = {"compile": True, "compile_backend": "aot_eager"}
QUICK = replace(MODELS["gpt"], activation_func="quick_gelu")
COMPILED_MODELS = {
    **MODELS,
    "llama tied, short": replace(MODELS["llama tied"], num_layers=2),
    "gpt, short": replace(MODELS["gpt"], num_layers=2),
}
FULL = {"recompute_granularity": "full"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "nothing installed": (1, "llama", flags()),
    "dropout, ZeRO-3, recomputed": (2, "gpt, short", flags(strategy="optim_grads_params") | FULL),
    "tensor parallel, deferred weights": (
        4,
        "llama tied, short",
        flags(tp=2, pp=2, stages="Et|tmL", sequence=True)
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1, "mtp_num_layers": 1},
    ),
    "deferred weights": (
        2,
        "llama tied, short",
        flags(pp=2, stages="Et|tmL")
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
        flags(tp=2, pp=2, stages="Et|ttL", sequence=True, strategy="optim")
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(CASES, "dropout, ZeRO-3, recomputed"),
)
def test_compiled_layers_are_exact(case: str) -> None:
    world, model, settings = CASES[case]
    report = verify_in_pool(world, config(COMPILED_MODELS[model], world, **settings, **COMPILED))
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


def test_no_compiled_function_returns_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """For torch 2.11 such a result needs no gradient, while torch.compile traces."""
    written: set[str] = set()

    def watched(function: type, *arguments: Any) -> Any:
        result = super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
        for made in result if isinstance(result, tuple) else (result,):
            wrote = made is not None and made._version
            written.update({function.__name__} if wrote else ())
        return result

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(watched))
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)  # noqa: B023
        written.clear()
        for model in (*MODELS.values(), QUICK):
            stage = Stage(model, StageSpec(False, tuple(range(model.num_layers)), False))
            stage.apply(lambda module: [p.data.normal_() for p in module.parameters(False)])
            (batch,) = on_device([batch_of(model, [[5, 7], [12]])], torch.device("cpu"))
            stage(torch.randn(24, model.hidden_size, requires_grad=True), batch)
        outside = {"_Local"}  # of attention, which is not compiled
        written -= outside
        assert bool(written) != compiling, written


@dataclass(frozen=True)
class Dense:
    """What a packed kernel computes, by a mask, as operations that a graph can hold."""

    scale: float | None

    def _weights(self, q: Tensor, k: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        places = torch.arange(len(q))
        ids = torch.searchsorted(at.starts, places, right=True)
        apart = places[:, None] - places
        seen = (ids[:, None] == ids) & (apart >= 0)
        if at.window is not None:
            seen = seen & (apart <= at.window)
        repeats = q.shape[1] // k.shape[1]
        scores = torch.einsum("tnd,und->ntu", q, k.repeat_interleave(repeats, 1))
        scores = (scores * self._scale(q)).masked_fill(~seen, float("-inf"))
        return scores, scores.logsumexp(-1)

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Pieces) -> tuple[Tensor, Tensor]:
        scores, lse = self._weights(q, k, at)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return torch.einsum("ntu,und->tnd", (scores - lse[..., None]).exp(), values), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, at: Pieces
    ) -> Grads:
        groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
        p = (self._weights(q, k, at)[0] - lse[..., None]).exp()
        keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
        dp = torch.einsum("tnd,und->ntu", grad, values) - (grad * out).sum(-1).t()[..., None]
        ds = p * dp * self._scale(q)
        dk, dv = torch.einsum("ntu,tnd->und", ds, q), torch.einsum("ntu,tnd->und", p, grad)
        shared = (x.unflatten(1, (groups, repeats)).sum(2) for x in (dk, dv))
        return torch.einsum("ntu,und->tnd", ds, keys), *shared


@pytest.mark.parametrize("name", chosen(["llama", "sinks", "latent"]))
def test_attention_in_one_call_is_within_the_graph(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for FlashAttention: exact, without a break, for any number of documents."""
    monkeypatch.setattr(attention, "lacking_packed", lambda *_: "")
    monkeypatch.setattr(attention, "PackedFlash", Dense)
    torch.compiler.reset()
    counters.clear()
    model = replace(MODELS[name], num_layers=2)
    plain, compiled = (
        Stage(model, StageSpec(False, (0, 1), False)).to(torch.float64) for _ in range(2)
    )
    plain.apply(lambda module: [p.data.normal_(std=0.3) for p in module.parameters(False)])
    compiled.load_state_dict(plain.state_dict())
    compile_layers(compiled, "aot_eager")
    for rows in ([[5, 7], [12]], [[3, 4, 5], [6, 6]], [[12], [12]], [[1, 11], [2, 10]]):
        x = torch.randn(24, model.hidden_size, dtype=torch.float64)
        found = []
        for stage in (plain, compiled):
            (batch,) = on_device([batch_of(model, rows)], torch.device("cpu"))
            stage.zero_grad()
            own = x.clone().requires_grad_()
            y = stage(own, batch)
            y.square().sum().backward()
            found.append((y, own.grad, *(p.grad for p in stage.parameters())))
        for true, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)
    assert not counters["graph_break"]
    kinds = len({model.window_of(layer) for layer in range(2)})
    assert counters["stats"]["unique_graphs"] <= 4 * kinds


def _compiled(rank: int, world_size: int, settings: Config, folder: Path) -> tuple[int, int]:
    """Runs of compiled graphs in a step before one that is measured, and in one after it."""
    runs = [0]

    def backend(graph: Any, _: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            runs[-1] += 1
            return graph(*arguments)

        return counted

    compiled = partial(torch.compile, backend=backend)
    torch.compiler.reset()
    with (
        shared_groups(),
        patch.object(torch, "compile", lambda function, **_: compiled(function)),
    ):
        engine = Engine(check(settings, world_size), rank, torch.device("cpu"))
        rows = slice(0, settings.training.global_batch_size)
        batches = microbatches(settings, global_batch(settings, 0), rows)
        engine.gradients(batches)
        with measured(engine, 1, folder):
            engine.gradients(batches)
        runs.append(0)
        engine.gradients(batches)
    return runs[0], runs[1]


def test_layers_stay_compiled_after_a_measured_step(pool: Pool, tmp_path: Path) -> None:
    model = replace(MODELS["llama"], num_layers=2)
    settings = config(model, **flags(), **COMPILED, global_batch_size=2)
    ((before, after),) = pool.run(1, _compiled, settings, tmp_path)
    assert before == after > 0


def _graphs(rank: int, world_size: int, settings: Config) -> int:
    """Number of graphs that a step compiles, each of which then runs as it was traced."""
    torch.compiler.reset()
    counters.clear()
    traced = partial(torch.compile, backend="eager")
    with shared_groups(), patch.object(torch, "compile", lambda layer, **_: traced(layer)):
        engine = Engine(check(settings, world_size), rank, torch.device("cpu"))
        rows = slice(0, settings.training.global_batch_size)
        engine.gradients(microbatches(settings, global_batch(settings, 0), rows))
    return counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_is_compiled_once(tp: int, pool: Pool) -> None:
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    model = replace(MODELS["llama"], window_size=3)
    few, many = (
        config(replace(model, num_layers=layers), **flags(tp=tp), **COMPILED, **rates)
        for layers in (2, 12)  # more than torch compiles before it gives up
    )
    assert pool.run(tp, _graphs, many)[0] == pool.run(tp, _graphs, few)[0] > 0
