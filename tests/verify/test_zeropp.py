"""ZeRO++ computes what one device computes: exactly (hpZ), or with the same rounding (qwZ, qgZ)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.data_parallel.blocks import BLOCK
from fivefold.mesh.slices import local_tensor
from fivefold.model.prediction import valid_by_depth
from fivefold.train.batches import as_batch
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of
from fivefold.verify.reference import batches_of, gradients, plain_model
from fivefold.verify.shrink import prepare
from tests.pool import run
from tests.verify.cases import (
    MIXTURE,
    MODELS,
    STAGES,
    chosen,
    config,
    flags,
    named,
    shared_groups,
    verify_in_pool,
)

ZERO3 = "optim_grads_params"
HPZ, QWZ = {"zero_hpz_partition_size": 2}, {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
QGZ_OF_NODES = QGZ | {"zero_qgz_partition_size": 2}
EVERY = HPZ | QWZ | QGZ_OF_NODES
MODELS_AND_EXPERTS = MODELS | {"mixture": MIXTURE}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "hpZ": (4, "llama tied", flags(dp=4, strategy=ZERO3) | HPZ),
    "hpZ, recomputed, no overlap": (
        4,
        "gpt",
        flags(dp=4, strategy=ZERO3)
        | HPZ
        | {"recompute_granularity": "full", "overlap_param_gather": False},
    ),
    "hpZ, tp, interleaved pp, weights deferred": (
        8,
        "llama",
        flags(pp=2, dp=4, stages=STAGES[2, 1], strategy=ZERO3)
        | HPZ
        | {"pipeline_schedule": "zb_h1", "micro_batch_size": 1},
    ),
    "hpZ, stages kept gathered": (
        8,
        "llama tied",
        flags(pp=2, dp=4, stages="v:E|t|t|tL", strategy=ZERO3)
        | HPZ
        | {"pipeline_schedule": "zb_v", "pipeline_max_unsharded_stages": 1, "micro_batch_size": 1},
    ),
    "hpZ of a ring, tp": (
        8,
        "latent",
        flags(tp=2, dp=2, sequence=True, strategy=ZERO3)
        | HPZ
        | {"context_parallel_size": 2, "cp_comm_type": ("p2p",)},
    ),
    "hpZ, experts on other ranks": (8, "mixture", named(ep=2, strategy=ZERO3) | HPZ | {}),
    "qwZ, ZeRO-1": (2, "gpt", flags(dp=2, strategy="optim") | QWZ),
    "qwZ, experts": (4, "mixture", named(ep=2, strategy=ZERO3) | QWZ),
    "qwZ, experts of one shard": (4, "mixture", named(ep=4, strategy=ZERO3) | QWZ),
    "qwZ in bf16": (2, "gpt", flags(dp=2, strategy=ZERO3) | QWZ | {"precision": "bf16"}),
    "qgZ, ZeRO-2": (4, "gpt", flags(dp=4, strategy="optim_grads") | QGZ),
    "all, hsdp, tp": (
        8,
        "llama tied",
        flags(tp=1, dp=8, strategy=ZERO3, replicas=2) | EVERY,
    ),
    "all, experts split": (4, "mixture", named(ep=2, strategy=ZERO3) | EVERY),
    "hpZ, stages of one rank kept gathered": (
        4,
        "llama tied",
        flags(dp=4, stages="E|t|t|tL", strategy=ZERO3)
        | HPZ
        | {"pipeline_schedule": "interleaved_zb", "pipeline_max_unsharded_stages": 1}
        | {"micro_batch_size": 1},
    ),
    "all, tied over pp": (8, "gpt", flags(pp=2, dp=4, strategy=ZERO3) | EVERY),
    "all, tp, experts split": (8, "mixture", named(tp=2, ep=2, strategy=ZERO3) | EVERY),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "hpZ, stages of one rank kept gathered",
        "all, experts split",
    ),
)
def test_layouts_compute_what_one_device_computes(case: str) -> None:
    world, model, settings = CASES[case]
    report = verify_in_pool(world, config(MODELS_AND_EXPERTS[model], world, **settings))
    assert report.passed, report.text()


def _rounded(flat: Tensor, bits: int) -> Tensor:
    """Blocks from the start on, each of multiples of its largest element over the top integer."""
    top, parts = 2 ** (bits - 1) - 1, []
    for block in flat.split(BLOCK):
        step = (block.abs().max().float() / top).clamp(min=1e-30).double()
        parts.append((block / step).round() * step)
    return torch.cat(parts)


def _units(model: torch.nn.Module) -> Iterator[list[str]]:
    """Names of the parameters that are gathered together: each layer, then both ends."""
    names = [name for name, _ in model.named_parameters()]
    layers = dict.fromkeys(".".join(n.split(".")[:2]) for n in names if n.startswith("layers."))
    for layer in layers:
        yield [name for name in names if name.startswith(f"{layer}.")]
    yield [name for name in names if not name.startswith("layers.")]


def _shards(whole: Tensor, ranks: int) -> list[Tensor]:
    """Rows of each rank, padded to the same number."""
    each = -(-len(whole) // ranks)
    padded = torch.cat([whole, whole.new_zeros(each * ranks - len(whole), *whole.shape[1:])])
    return list(padded.split(each))


def _sent(unit: dict[str, Tensor], ranks: int, to: int, bits: int) -> dict[str, Tensor]:
    """What arrives of one shard of a unit's parameters: matrices rounded, vectors as they are."""
    parts = {name: _shards(whole, ranks)[to] for name, whole in unit.items()}
    matrices = {name: part for name, part in parts.items() if part.ndim > 1}
    flat = _rounded(torch.cat([part.flatten() for part in matrices.values()]), bits)
    pieces = flat.split([part.numel() for part in matrices.values()])
    pairs = zip(matrices.items(), pieces, strict=True)
    return parts | {name: piece.view_as(part) for (name, part), piece in pairs}


def _summed(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in each]).sum(0) for name in each[0]}


def _reduced(of_ranks: list[dict[str, Tensor]], to: int, node: int) -> dict[str, Tensor]:
    """The twin of qgZ: the shard `to` of the sums, over nodes of so many ranks first."""
    ranks = len(of_ranks)
    if node == 1:
        return _summed([_sent(unit, ranks, to, 4) for unit in of_ranks])
    nodes = [of_ranks[first : first + node] for first in range(0, ranks, node)]
    sums = [_summed([_sent(unit, ranks, to, 4) for unit in held]) for held in nodes]
    return _summed([_sent(one, 1, 0, 4) for one in sums])


@shared_groups()
def _against_the_twin(rank: int, world: int, prepared: Config) -> tuple[float, float]:
    """Largest differences of the loss and of this rank's gradients, relative."""
    engine = Engine(check(prepared, world), rank, torch.device("cpu"))
    batch = global_batch(prepared, 0)
    parts = [microbatches(prepared, batch, rows_of(prepared, r, world)) for r in range(world)]
    loss = engine.gradients(parts[rank]).read().loss
    model = plain_model(prepared, torch.float64)
    own = prepared.with_values(zero_hpz_partition_size=1)
    engine.model.reshard()
    weights = {name: p.full_tensor().detach() for name, p in engine.parameters.items()}
    bits = 8 if own.parallel.zero_quantized_weights else None
    with torch.no_grad():
        for names in _units(model):
            unit = {name: weights[name] for name in names}
            if bits:
                arrived = [_sent(unit, world, to, bits) for to in range(world)]
                unit = {n: torch.cat([a[n] for a in arrived])[: len(unit[n])] for n in unit}
            for name, value in unit.items():
                model.get_parameter(name).copy_(value)
    tokens = valid_by_depth(as_batch(batch, 0, 0))
    found = [gradients(model, batches_of(prepared, part, 0), tokens) for part in parts]
    true = sum(float(losses[:, 0].sum()) for losses, _ in found) / tokens[0]
    node, worst = prepared.parallel.zero_qgz_partition_size, 0.0
    for names in _units(model):
        expected = _reduced([{n: grads[n] for n in names} for _, grads in found], rank, node)
        for name in names:
            grad = engine.parameters[name].grad
            assert grad is not None
            mine = local_tensor(grad)
            off = (mine - expected[name][: len(mine)]).abs()
            scale = max(float(grads[name].abs().max()) for _, grads in found)
            worst = max(worst, float(off.max()) / scale if off.numel() else 0.0)
    return abs(loss - true) / true, worst


@pytest.mark.parametrize("settings", [EVERY, QGZ], ids=["all, in nodes", "qgZ, at once"])
def test_blocks_of_shards_are_those_of_a_plain_twin(settings: dict[str, Any]) -> None:
    strategy = ZERO3 if "zero_hpz_partition_size" in settings else "optim"
    values = named(strategy=strategy) | settings | {"global_batch_size": 4}
    wide = config(MODELS["llama tied"], **values)
    prepared = prepare(check(wide, 4))[0].config
    for loss, grads in run(4, _against_the_twin, prepared):
        assert loss < 1e-12 and grads < 1e-12
