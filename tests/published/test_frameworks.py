"""Steps of nanotron and torchtitan: what is left after them, what raises or lowers a peak."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.counts.shards import held
from fivefold.layout import Layout
from fivefold.published.nanotron import Nanotron
from fivefold.published.torchtitan import Torchtitan, TorchtitanCompiledLoss

MODEL = replace(PRESETS["llama3-8b"], num_layers=4)
MIB = 2**20  # of a block, at most so much is spare


def layout(world: int = 8, **values: Any) -> Layout:
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "vpp": "num_virtual_stages_per_pipeline_rank",
        "zero": "data_parallel_sharding_strategy",
        "recompute": "recompute_granularity",
    }
    settings = {names.get(name, name): value for name, value in values.items()}
    settings = {
        "seq_length": 4096,
        "global_batch_size": 32,
        "sequence_parallel": "tp" in values,
        "data_parallel_sharding_strategy": "optim_grads_params",
    } | settings
    return check(Config(MODEL).with_values(**settings), world, planned=True)


WAYS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 2},
    {"tp": 2},
    {"tp": 4, "tp_comm_overlap": True, "micro_batch_size": 4},
    {"cp": 2},
    {"pp": 2},
    {"pp": 4, "tp": 2},
    {"pp": 2, "vpp": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_of_torchtitan_leaves_shards_of_weights_and_moments(
    way: dict[str, Any], recompute: str | None, compiled: bool
) -> None:
    run = layout(**way, recompute=recompute)
    for rank in range(run.grid.pp):
        for selects in (False, True):
            replay = Torchtitan(run, rank, compiled=compiled, selects=selects)
            memory = replay.run()
            shards = [held(s, replay.shards) for unit in replay.units.values() for s in unit]
            arriving = sum(not p.embedding for p in replay.stages.values())
            arriving += sum(not p.head for p in replay.stages.values())
            buffers = arriving * replay.num_microbatches if run.grid.pp > 1 else 0
            last = max(2 * sum(map(prod, unit)) for unit in replay.units.values())
            last += last / replay.shards
            left = 12 * sum(shards) + buffers * replay.sizes.hidden
            # What was gathered last stays until the next has been.
            assert left <= memory.allocated <= left + last + 512 * 3 * len(shards)
            assert memory.allocated < memory.most_allocated <= memory.reserved


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("zero", ["no_shard", "optim"])
def test_a_step_of_nanotron_leaves_its_state(way: dict[str, Any], zero: str) -> None:
    run = layout(**way, zero=zero)
    for rank in range(run.grid.pp):
        replay = Nanotron(run, rank)
        memory = replay.run()
        whole, shards = sum(replay.weights.values()), replay.shards
        ddp = 2 if zero == "no_shard" and run.grid.dp > 1 else 0
        left = (2 + 4 + ddp + 12 / shards) * whole
        assert left <= memory.allocated <= left + MIB * (4 * len(replay.weights) + 2)


def test_a_pipeline_s_first_rank_holds_more_microbatches_than_its_second() -> None:
    run = layout(pp=4, zero="optim", seq_length=16384)
    first, second = (Nanotron(run, rank).run().most_reserved for rank in (0, 1))
    assert first > second


def test_recomputing_more_reserves_less() -> None:
    run = layout(micro_batch_size=4)
    whole = layout(micro_batch_size=4, recompute="full")
    nothing, selected = (Torchtitan(run, 0, selects=s).run().reserved for s in (False, True))
    assert Torchtitan(whole, 0).run().reserved < selected < nothing
    eager = Torchtitan(run, 0, selects=True, compiled=False).run().reserved
    assert eager > selected


def test_what_a_framework_shards_it_does_not_hold() -> None:
    peaks = [Torchtitan(layout(world, global_batch_size=world), 0).run() for world in (8, 64)]
    units = Torchtitan(layout(), 0).units.values()
    shards = [12 * sum(held(s, n) for unit in units for s in unit) for n in (8, 64)]
    saved = peaks[0].most_allocated - peaks[1].most_allocated
    assert saved == pytest.approx(shards[0] - shards[1], rel=0.05)


def test_a_device_too_small_overflows() -> None:
    run = layout(zero="optim")
    needed = Nanotron(run, 0).run().most_allocated
    assert not Nanotron(run, 0, 2.0 * needed).run().overflowed
    assert Nanotron(run, 0, 0.9 * needed).run().overflowed
    sharded = layout()
    needed = Torchtitan(sharded, 0).run().most_allocated
    assert not Torchtitan(sharded, 0, 1.1 * needed).run().overflowed
    assert Torchtitan(sharded, 0, 0.9 * needed).run().overflowed


def test_activations_grow_with_tokens() -> None:
    lengths = (8192, 16384, 32768)
    peaks = [
        Nanotron(layout(zero="optim", seq_length=length), 0).run().most_allocated
        for length in lengths
    ]
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.02)


def test_a_compiled_loss_keeps_no_logits_in_fp32() -> None:
    """Else the log-softmax and its gradient are, and where layers are not compiled."""
    run = layout(micro_batch_size=4, recompute="full")
    logits = 4 * 4096 * MODEL.padded_vocab_size
    apart, joined = (kind(run, 0).run() for kind in (Torchtitan, TorchtitanCompiledLoss))
    saved = apart.most_allocated - joined.most_allocated
    assert saved == pytest.approx(2 * 4 * logits, rel=0.01)
    eager = [kind(run, 0, compiled=False) for kind in (Torchtitan, TorchtitanCompiledLoss)]
    assert eager[0].run().most_allocated == eager[1].run().most_allocated
