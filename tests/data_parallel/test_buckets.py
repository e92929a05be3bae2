"""Buckets of no_shard: how many messages a step sends, and where gradients lie."""

from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.data.packing import Microbatch
from fivefold.data_parallel.replicated import ReplicatedStage
from fivefold.mesh.buckets import buckets_of
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import MODELS, chosen, config, flags, shared_groups


def test_a_bucket_ends_with_what_fills_it() -> None:
    sizes = [3, 3, 1, 9, 2, 1]
    cut = [sizes[part] for part in buckets_of(sizes, 6)]
    assert cut == [[3, 3], [1, 9], [2, 1]]
    assert [sizes[part] for part in buckets_of(sizes, 1)] == [[size] for size in sizes]
    assert [*buckets_of([], 6)] == []


def _engine(rank: int, world: int, settings: dict[str, Any]) -> tuple[Engine, list[Microbatch]]:
    """An engine, and what it reads in a step of two microbatches."""
    replicas = world // settings.get("tensor_model_parallel_size", 1)
    replicas //= settings.get("pipeline_model_parallel_size", 1)
    config = Config(PRESETS["debug-llama"]).with_values(
        num_layers=2,
        seq_length=16,
        **{"precision": "fp32", "global_batch_size": 2 * replicas} | settings,
    )
    engine = Engine(check(config, world), rank, torch.device("cpu"))
    return engine, own_batch(engine, 0)


@shared_groups()
def _messages(rank: int, world: int, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Elements of each message of gradients in a step, and of the step's gradients."""
    engine, rows = _engine(rank, world, settings)
    engine.step(rows)
    sent: list[int] = []
    native = dist.all_reduce

    def counted(tensor: torch.Tensor, **others: Any) -> Any:
        if others["group"] is engine.groups.data and tensor.is_floating_point():
            sent.append(tensor.numel())
        return native(tensor, **others)

    with patch.object(dist, "all_reduce", counted):
        engine.gradients(rows)
    grads = [local_tensor(p.grad) for p in engine.parameters.values() if p.grad is not None]
    storages = {grad.untyped_storage().data_ptr() for grad in grads}
    assert len(storages) == len(sent), "each gradient is a part of its message"
    return sorted(sent), [grad.numel() for grad in grads][::-1]


DEFERRED = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"ddp_bucket_size": 1}),
        (2, {"ddp_bucket_size": 5_000, "overlap_grad_reduce": False}),
        (2, {"ddp_bucket_size": 1 << 40}),
        (4, {"ddp_bucket_size": 5_000} | DEFERRED),
        (4, {"ddp_bucket_size": 5_000, "tensor_model_parallel_size": 2}),
    ],
)
def test_a_step_sends_a_message_a_bucket(ranks: int, settings: dict[str, Any]) -> None:
    size = settings["ddp_bucket_size"]
    for sent, sizes in run(ranks, _messages, settings):
        assert sent == sorted(sum(sizes[part]) for part in buckets_of(sizes, size))


class _Copies(TorchDispatchMode):
    """Where tensors are copied to."""

    def __init__(self) -> None:
        super().__init__()
        self.to: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.to.add(_place(args[0]))
        return func(*args, **kwargs or {})


def _place(x: torch.Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.storage_offset()


@shared_groups()
def _copied(rank: int, world: int, settings: dict[str, Any]) -> set[str]:
    """Names of the parameters whose gradients are copied into their messages."""
    engine, rows = _engine(rank, world, settings)
    engine.step(rows)
    with _Copies() as seen:
        engine.gradients(rows)
    grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
    assert set(grads) == set(engine.parameters)
    return {name for name, grad in grads.items() if _place(local_tensor(grad)) in seen.to}


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.mark.parametrize(
    ("ranks", "settings", "makes"),
    [
        (2, {}, True),
        (2, {"micro_batch_size": 1, "overlap_grad_reduce": False}, True),
        (2, {"micro_batch_size": 1, "gradient_accumulation_fusion": False}, True),
        (4, DEFERRED, True),
        pytest.param(4, SPLIT, True, marks=pytest.mark.exhaustive),
        (4, SPLIT | RECOMPUTED, True),
        (2, RECOMPUTED, False),
        (2, {"precision": "bf16", "micro_batch_size": 1}, False),  # in fp32, by a CPU
    ],
)
def test_products_make_gradients_in_their_messages(
    ranks: int, settings: dict[str, Any], makes: bool
) -> None:
    """Of linear layers; embeddings and norms are copied there."""
    for copied in run(ranks, _copied, settings):
        linear = {name for name in copied if "norm" not in name and "embed" not in name}
        assert linear < copied and (not linear if makes else linear)


@shared_groups()
def _same_sums(rank: int, world: int, settings: dict[str, Any]) -> None:
    """However they are added up, gradients in bf16 have the same sum, in fp32."""
    found = []
    for how in ({}, {"overlap_grad_reduce": False}, {"gradient_accumulation_fusion": False}):
        engine, rows = _engine(rank, world, settings | how | {"micro_batch_size": 1})
        engine.gradients(rows)
        grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
        found.append({name: local_tensor(grad) for name, grad in grads.items()})
    assert len(rows) > 1 and all(grad.dtype == torch.float32 for grad in found[0].values())
    assert any((grad.bfloat16() != grad).any() for grad in found[0].values())
    for other, tables in zip(found[1:], (True, False), strict=True):
        for name, grad in other.items():
            if tables or "embed" not in name:  # whose rows autograd adds up in bf16
                assert torch.equal(found[0][name], grad)


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, DEFERRED],
    ids=["plain", "tensors of a mesh", "deferred"],
)
def test_sums_keep_what_their_terms_have_not(settings: dict[str, Any]) -> None:
    ranks = 2 if not settings else 4
    run(ranks, _same_sums, settings | {"precision": "bf16"})


@shared_groups()
def _arrivals(rank: int, world: int, family: str, settings: dict[str, Any]) -> Counter[str]:
    """How often the hooks of each parameter fire in the last backward of a step."""
    asked = config(MODELS[family], world, **settings)
    layout, came = check(asked, world), Counter[torch.Tensor]()
    arrived = ReplicatedStage._arrived

    def noted(stage: ReplicatedStage, parameter: torch.Tensor) -> None:
        came[parameter] += bool(stage._missing)
        arrived(stage, parameter)

    with patch.object(ReplicatedStage, "_arrived", noted):
        engine = Engine(layout, rank, torch.device("cpu"))
        own = rows_of(asked, layout.grid.dp_rank(rank), layout.grid.dp)
        engine.step(microbatches(asked, global_batch(asked, 0), own))
    return Counter({name: came[p] for name, p in engine.parameters.items()})


HELD = {
    "whole": (2, flags()),
    "split": (4, flags(tp=2, sequence=True)),
    "split, no fusion": (
        4,
        flags(tp=2, sequence=True) | {"gradient_accumulation_fusion": False},
    ),
}


ARRIVALS = [*product(MODELS, HELD)]


# Each kind of layer, each way with some: most families have their layers of others.
IN_THE_GATE = (
    ("hybrid, experts", "split"),
    ("delta, experts", "split"),
    ("kimi, experts", "split, no fusion"),
    ("convolving tied", "whole"),
    ("whole", "split, no fusion"),
    ("oss", "split, no fusion"),
    ("bare, LayerNorm, tied", "split"),
    ("sparse", "whole"),
    ("gpt, positions from the third row", "split"),
    ("llama tied", "whole"),
)


@pytest.mark.parametrize("case", chosen(ARRIVALS, *IN_THE_GATE), ids=str)
def test_each_gradient_comes_once_before_its_message_leaves(case: tuple[str, str]) -> None:
    family, how = case
    world, settings = HELD[how]
    for came in run(world, _arrivals, family, settings):
        assert set(came.values()) == {1}, [name for name, times in came.items() if times != 1]
