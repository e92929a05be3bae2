"""Buckets of no_shard: how many messages a step sends, and where gradients lie."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.mesh.buckets import buckets_of
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of
from tests.pool import run
from tests.verify.cases import shared_groups


def test_a_bucket_ends_with_what_fills_it() -> None:
    sizes = [3, 3, 1, 9, 2, 1]
    cut = [sizes[part] for part in buckets_of(sizes, 6)]
    assert cut == [[3, 3], [1, 9], [2, 1]]
    assert [sizes[part] for part in buckets_of(sizes, 1)] == [[size] for size in sizes]
    assert [*buckets_of([], 6)] == []


@shared_groups()
def _messages(rank: int, world: int, settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Elements of each message of gradients in a step, and of the step's gradients."""
    config = Config(PRESETS["debug-llama"]).with_values(
        seq_length=16, global_batch_size=2 * world, precision="fp32", **settings
    )
    engine = Engine(check(config, world), rank, torch.device("cpu"))
    own = rows_of(config, engine.layout.grid.dp_rank(rank), engine.layout.grid.dp)
    rows = microbatches(config, global_batch(config, 0), own)
    sent: list[int] = []
    native = dist.all_reduce

    def counted(tensor: torch.Tensor, **others: Any) -> Any:
        if others["group"] is engine.groups.data and tensor.is_floating_point():
            sent.append(tensor.numel())
        return native(tensor, **others)

    engine.step(rows)
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
