"""What the planner knows of an optimizer in host memory."""

from dataclasses import replace
from functools import partial
from math import inf

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.memory import NUM_UPDATE_BUFFERS, UPDATE_BUCKET
from fivefold.config.presets import PRESETS
from fivefold.counts.offload import host_traffic, times_reduced
from fivefold.counts.policy import engine_policy
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.predict.cluster import HOST_EFFICIENCY, Cluster, preset
from fivefold.predict.data_parallel.update import (
    bringing_seconds,
    faster_on_device,
    leaving_seconds,
    offload_seconds,
)
from fivefold.predict.memory.liveness import WARM_UP
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict
from fivefold.search.request import request
from fivefold.search.search import search
from fivefold.tell.explain import shortfall
from fivefold.tell.infeasible import why_nothing

ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
AWAY = {"optimizer_cpu_offload": True}
VISITING = {"offload_optimizer_states": True}


def layout(**values: object) -> Layout:
    settings: dict[str, object] = {"global_batch_size": 8, "micro_batch_size": 1, "seq_length": 512}
    return check(Config(PRESETS["llama3-8b"]).with_values(**(settings | values)), 8)


def test_what_leaves_the_device_is_in_host_memory() -> None:
    cluster = preset("H100")
    here, away = (
        peak_memory(layout(**ZERO3), cluster),
        peak_memory(layout(**ZERO3, **AWAY), cluster),
    )
    shard = here.worst.parts["weights"] / 4  # fp32
    assert here.worst.parts["optimizer"] == 8 * shard and here.host == 0
    assert away.worst.parts["weights"] == 2 * shard and away.host == 16 * shard
    assert not {"optimizer", "gradients"} & away.worst.parts.keys()


def test_what_visits_the_device_needs_rooms_there_and_passes_the_link_both_ways() -> None:
    cluster = preset("H100")
    on_host, visiting = (layout(**ZERO3, **way) for way in (AWAY, VISITING))
    here, there = (peak_memory(each, cluster) for each in (on_host, visiting))
    assert there.host == here.host
    assert there.worst.parts["optimizer"] == NUM_UPDATE_BUFFERS * UPDATE_BUCKET * 16
    before, after = (host_traffic(each, 0) for each in (on_host, visiting))
    assert (after.to_host, after.to_device) == (4 * before.to_host, 8 * before.to_device)
    policy = engine_policy(visiting.config)
    slow = replace(cluster, host_bandwidth=1e9)
    assert offload_seconds(slow, policy, 1e9) == pytest.approx(16)  # both ways at once
    crowded = replace(cluster, host_memory_bandwidth=8e9)
    assert offload_seconds(crowded, policy, 1e9) == pytest.approx(28e9 / crowded.host_rate)
    on_disk = replace(policy, on_disk=True)
    assert offload_seconds(cluster, on_disk, 1e9) == pytest.approx(24e9 * 8 / 6e9)
    away = host_traffic(layout(**ZERO3, **VISITING, param_cpu_offload=True), 0)
    assert (away.to_host - after.to_host, away.to_device) == (before.to_device, after.to_device)


def test_the_faster_place_of_updates_depends_on_the_link_and_on_who_shares_the_host() -> None:
    shared = preset("H100")
    policy = engine_policy(layout(**AWAY).config)
    assert faster_on_device(shared, policy)
    assert not faster_on_device(replace(shared, num_gpus=1), policy)
    assert not faster_on_device(replace(shared, host_bandwidth=10e9), policy)


def test_a_layout_must_fit_into_host_memory_too() -> None:
    needed = peak_memory(layout(**ZERO3, **AWAY), preset("H100")).host
    for room, fits in ((8 * needed, True), (8 * needed - 8, False), (None, True)):
        cluster = replace(preset("H100"), host_memory_bytes=room)
        memory = peak_memory(layout(**ZERO3, **AWAY), cluster)
        assert memory.fits == fits
        assert fits or "more than its share" in shortfall(memory)
        assert peak_memory(layout(**ZERO3), cluster).fits


def test_what_lies_on_a_disk_is_counted_there_and_takes_its_time() -> None:
    cluster = preset("H100")
    on_disk = AWAY | {"optimizer_offload_path": "away"}
    here, there = (peak_memory(layout(**ZERO3, **way), cluster) for way in (AWAY, on_disk))
    gradients, buffers = here.host / 4, NUM_UPDATE_BUFFERS * UPDATE_BUCKET * 12
    assert (there.host, there.disk) == (gradients + buffers, 3 * gradients) and here.disk == 0
    for room, fits in ((8 * there.disk, True), (8 * there.disk - 8, False)):
        memory = peak_memory(layout(**ZERO3, **on_disk), replace(cluster, disk_bytes=room))
        assert memory.fits == fits
        assert fits or "of disk for each GPU" in shortfall(memory)
        assert peak_memory(layout(**ZERO3, **AWAY), replace(cluster, disk_bytes=room)).fits
    policy = engine_policy(layout(**on_disk).config)
    assert offload_seconds(cluster, policy, 1e9) == pytest.approx(24e9 * 8 / 6e9)


def test_what_the_host_sends_is_not_gathered_before_it_is_there() -> None:
    early = {"overlap_param_gather_with_optimizer_step": True}
    with pytest.raises(ConfigError, match="on its way from the host"):
        layout(data_parallel_sharding_strategy="optim", **early, **AWAY)
    assert layout(data_parallel_sharding_strategy="optim", **early)


def test_shares_of_a_node() -> None:
    node = preset("H100", 16)
    assert node.host_share == 2e12 / 8
    assert node.host_rate == HOST_EFFICIENCY * 614.4e9 / 8
    alone = replace(node, num_gpus=1)
    assert alone.host_share == 2e12 and alone.host_rate == 8 * node.host_rate
    unknown = replace(node, host_memory_bytes=None, host_memory_bandwidth=None)
    assert unknown.host_share == inf and unknown.host_rate == unknown.host_bandwidth


def _on_host(cluster: Cluster, **values: object) -> float:
    parts = {part.name: part.seconds for part in predict(layout(**values), cluster).parts}
    return parts["offloading"]


def test_the_update_takes_the_traffic_of_host_memory_and_late_gradients_their_copies() -> None:
    cluster, policy = preset("H100"), engine_policy(layout(**AWAY).config)
    assert offload_seconds(cluster, policy, 1e9) == pytest.approx(42e9 / cluster.host_rate)
    fast = replace(cluster, host_memory_bandwidth=1e15)
    assert offload_seconds(fast, policy, 1e9) == pytest.approx(2e9 / cluster.host_bandwidth)
    copy = 4e9 / cluster.host_bandwidth
    late = partial(leaving_seconds, cluster, policy)
    assert late([(1e9, 3)], copy / 2) == pytest.approx(1.5 * copy)
    assert late([(1e9, 3)], 2 * copy) == 0
    # What leaves less often than the rest leaves beside it.
    assert late([(1e9, 1), (2e9, 3)], copy) == pytest.approx(2 * copy + 2 * copy)
    assert late([(1e9, 3), (2e9, 3)], copy) == late([(3e9, 3)], copy)
    half = _on_host(cluster, **ZERO3, **AWAY, optimizer_offload_fraction=0.5)
    assert _on_host(cluster, **ZERO3) == 0 < half < _on_host(cluster, **ZERO3, **AWAY)


def test_gradients_leave_as_often_as_they_are_reduced() -> None:
    once, thrice = (layout(**ZERO3, **AWAY, global_batch_size=n) for n in (8, 24))
    one, three = host_traffic(once, 0), host_traffic(thrice, 0)
    assert three.to_host == 3 * one.to_host and three.to_device == one.to_device + 2 * one.to_host
    assert host_traffic(layout(**ZERO3), 0).to_host == 0
    replicas = {"num_distributed_optimizer_instances": 2, "global_batch_size": 24}
    assert host_traffic(layout(**ZERO3, **AWAY, **replicas), 0).to_host == 2 * one.to_host


def test_experts_leave_as_often_as_they_are_reduced_also_beside_replicas_of_the_rest() -> None:
    """With an expert on one rank only, each microbatch's gradients of it are complete."""
    sizes = {"expert_model_parallel_size": 4, "global_batch_size": 40, "precision": "bf16"}
    way = {**ZERO3, **AWAY, **sizes, "num_distributed_optimizer_instances": 2}
    model = replace(PRESETS["debug-mixtral"], num_layers=2)
    run = check(Config(model).with_values(seq_length=32, **way), 4, planned=True)
    traffic = host_traffic(run, 0)
    slow = replace(preset("H100"), host_bandwidth=1e6)  # beside which a backward takes no time
    seconds = {part.name: part.seconds for part in predict(run, slow).parts}
    leaving = traffic.to_host / slow.host_bandwidth
    assert times_reduced(run, experts=False) == 1 < times_reduced(run, experts=True)
    assert leaving <= seconds["offloading"] * 1.01 < 1.3 * leaving


def test_nothing_fits_but_with_the_optimizer_on_the_host() -> None:
    model = replace(
        PRESETS["gpt2"],
        num_layers=12,
        hidden_size=3200,
        num_attention_heads=25,
        ffn_hidden_size=12800,
    )
    settings = Config(model).with_values(global_batch_size=8)
    asked = request(settings, preset("RTX 4090", 1), by_flag=["global_batch_size"])
    found = search(asked)
    assert not found.found
    (mistake,) = why_nothing(found).mistakes
    assert "--optimizer-cpu-offload" in mistake.works
    (told,) = (line for line in mistake.why if line.startswith("with --optimizer-cpu-offload:"))
    best = search(asked.but(**AWAY)).best
    assert best.memory.fits and best.memory.host > 0
    assert "of host memory" in told and f"{best.prediction.mfu:.1%} MFU" in told
    tight = replace(asked, cluster=replace(asked.cluster, host_memory_bytes=10e9))
    found = search(tight.but(**AWAY))
    assert not found.found
    with pytest.raises(ConfigError, match="of host memory for each GPU"):
        raise why_nothing(found)
    (mistake,) = why_nothing(search(tight)).mistakes
    ways = [way for way in mistake.works if "--optimizer-offload-path" in way]
    assert ways and any(f"with {ways[0]}:" in why and "of disk" in why for why in mistake.why)


WEIGHTS = ZERO3 | AWAY | {"param_cpu_offload": True}


def test_weights_off_the_device_are_counted_where_they_lie_and_come_for_each_gather() -> None:
    cluster = preset("H100")
    on_disk = WEIGHTS | {"param_offload_path": "away"}
    kept, away, there = (
        peak_memory(layout(**way), cluster) for way in (ZERO3 | AWAY, WEIGHTS, on_disk)
    )
    shard = kept.worst.parts["weights"]
    assert "weights" not in away.worst.parts and away.host == kept.host + shard
    visiting = 2 * (2 * 128256 * 4096 + 4096) / 8  # both ends, the largest block
    forwards = [memory.worst.phases[WARM_UP] for memory in (kept, away)]
    assert forwards[1] == forwards[0] - shard + visiting  # they peak where ends are gathered
    gathered = [memory.worst.parts["gathered weights"] for memory in (kept, away)]
    assert gathered[0] == gathered[1]  # in a backward the shard is gone when memory peaks
    assert there.host == kept.host + 2 * visiting and there.disk == shard
    for microbatches in (1, 3):
        before, after = (
            host_traffic(layout(**way, global_batch_size=8 * microbatches), 0)
            for way in (ZERO3 | AWAY, WEIGHTS)
        )
        assert after.weights == 2 * microbatches * shard and not before.weights
        assert before.to_device - after.to_device == shard and before.to_host == after.to_host


def test_weights_that_arrive_late_make_the_step_longer() -> None:
    slow = replace(preset("H100"), host_bandwidth=1e9)
    copy = 2e9 / 1e9
    policy = engine_policy(layout(**WEIGHTS).config)
    assert bringing_seconds(slow, policy, 1e9) == copy
    assert bringing_seconds(replace(slow, disk_bandwidth=1e8), policy, 1e9) == copy
    on_disk = replace(policy, weights_on_disk=True)
    assert bringing_seconds(replace(slow, disk_bandwidth=8e8), on_disk, 1e9) == 10 * copy
    assert _on_host(slow, **WEIGHTS) > _on_host(slow, **ZERO3, **AWAY)
    fast = replace(slow, host_bandwidth=1e15, host_memory_bandwidth=None)
    assert _on_host(fast, **WEIGHTS) == pytest.approx(_on_host(fast, **ZERO3, **AWAY), rel=1e-3)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"data_parallel_sharding_strategy": "optim_grads", **AWAY}, "keeps all of them there"),
        (ZERO3, "masters are on the device"),
        (WEIGHTS | {"zero_hpz_partition_size": 4}, "a second copy"),
        ({**ZERO3, **AWAY, "param_cpu_offload": False, "param_offload_path": "x"}, "offloaded"),
    ],
)
def test_weights_that_cannot_leave_are_refused(values: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        layout(**({"param_cpu_offload": True} | values))
