"""Every derived number, and the table of them."""

import re
from dataclasses import replace
from math import prod

import pytest

from benchmarks.memory_tables import activations, bytes_of_a_parameter
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.counts.derived import as_table, describe, moved_and_kept
from fivefold.counts.volumes import by_axis, step_volumes
from fivefold.description.activations import saved_activations, total
from fivefold.description.running import Running
from fivefold.units import human_bytes


def config(model: str, **values: object) -> Config:
    changed = replace(PRESETS[model], attention_dropout=0.0, hidden_dropout=0.0)
    return Config(changed).with_values(seq_length=16, precision="fp32", **values)


def test_every_number_comes_with_its_product() -> None:
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout = check(config("debug-llama", global_batch_size=16, **values), 8)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["world"] == ("8", "pp 2 x dp 2 x cp 1 x tp 2")
    assert told["microbatches"] == ("8", "global batch 16 / (micro batch 1 x dp 2)")
    assert told["tokens per step"] == ("256", "global batch 16 x sequence 16")
    assert told["padded vocabulary"] == ("512", "512 rounded up to a multiple of 128")
    assert told["parameters"][0] == "263 K"
    assert told["largest stage"] == ("131 K", "of 131 K + 131 K")


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("adapters", [None, 4])
def test_a_product_is_the_number_that_it_stands_beside(strategy: str, adapters: int | None) -> None:
    """As far as it is one of numbers that are all shown."""
    sizes = {"tensor_model_parallel_size": 2, "num_distributed_optimizer_instances": 2}
    asked = config("debug-llama", global_batch_size=16, data_parallel_sharding_strategy=strategy)
    asked = asked.with_values(**sizes if strategy != "no_shard" else {}, lora_rank=adapters)
    told = {name: (value, why) for name, value, why in describe(check(asked, 8, planned=True))}
    value, why = told["data parallel"]
    factors = [int(number) for number in re.findall(r"\d+", why)]
    assert prod(factors or [int(value)]) == int(value)
    assert ("all replicas" in why) == (strategy == "no_shard")
    value, why = told["FLOPs per token"]
    numbers = [float(number) for number in re.findall(r"([\d.]+) KFLOP", why)]
    *frozen, matmul, attention = numbers
    assert len(frozen) == (adapters is not None)
    scale = 1e3 if value.endswith("MFLOP") else 1
    shown = float(value.split()[0]) * scale
    assert shown == pytest.approx(3 * (matmul + attention) - sum(frozen), rel=0.01)


def test_what_is_off_the_device_is_told() -> None:
    def told(**values: object) -> dict[str, str]:
        layout = check(config("debug-llama", global_batch_size=8, **values), 2, planned=True)
        return {name: why for name, _, why in describe(layout)}

    host, disk = "in host memory a rank", "on a disk a rank"
    assert not {host, disk} & told().keys()
    away = told(optimizer_cpu_offload=True)
    assert away[host] == "offloaded masters and moments, and buffers for gradients"
    assert disk not in away
    away = told(offload_optimizer_states=True, optimizer_offload_path="/tmp")
    assert "from the disk" in away[host] and away[disk] == "offloaded masters and moments"


def test_the_forwards_that_run_twice_are_told() -> None:
    values = {"pipeline_model_parallel_size": 2, "recompute_in_flight_limit": 1}
    layout = check(config("debug-llama", global_batch_size=8, **values), 2)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["forwards run twice"][0] == "7 of 16"


def test_the_microbatches_whose_weight_gradients_wait_are_told() -> None:
    def waits(pp: int, schedule: str, strategy: str = "no_shard") -> tuple[str, str]:
        settings = config(
            "debug-llama",
            global_batch_size=16,
            pipeline_model_parallel_size=pp,
            pipeline_schedule=schedule,
            data_parallel_sharding_strategy=strategy,
        )
        rows = {name: (value, why) for name, value, why in describe(check(settings, 4))}
        return rows.get("dW waits", ("", ""))

    assert waits(1, "1f1b") == ("", "")
    assert waits(4, "1f1b") == ("", "")  # W follows B at once
    # On rank r of ZB-H1, W lags r backwards; B runs before the W that makes room.
    assert waits(4, "zb_h1")[0] == "4 x microbatch"
    assert waits(2, "zb_h1", "optim")[1].endswith("summed unsharded")
    assert waits(2, "zb_h1", "optim_grads")[1].endswith("reduced block by block when computed")


def test_experts_and_what_a_token_sees_of_them_are_told() -> None:
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    settings = config("deepseek-v3", expert_model_parallel_size=8, global_batch_size=8, **sizes)
    layout = check(settings, 16, planned=True)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["expert parallel"] == ("8", "ep 8 x etp 1 x 2 copies = 16 ranks of a stage")
    assert told["parameters"] == (
        "683 B",
        "embedding 927 M + 3 dense layers x 583 M + 58 layers with experts x 11.5 B + head 927 M "
        "+ multi-token prediction 11.6 B",
    )
    assert told["active parameters"] == ("38.2 B", "8 of 256 experts for each token")
    assert "left out" not in told


def test_the_table_is_aligned() -> None:
    assert as_table([("a", "1", "x"), ("long", "22", "")]) == "a      1  x\nlong  22"


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("model", ["debug-llama", "debug-deepseek-v3", "debug-gpt-oss"])
def test_bytes_are_told_before_the_run(model: str, strategy: str) -> None:
    values = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "data_parallel_sharding_strategy": strategy,
        "micro_batch_size": 2,
    }
    if PRESETS[model].num_experts:
        values["expert_model_parallel_size"] = 2
    layout = check(config(model, global_batch_size=8, **values), 8, planned=True)
    told = {name: value for name, value, _ in moved_and_kept(layout)}
    for axis in set().union(*(by_axis(step_volumes(layout, rank)) for rank in range(8))) - {
        "world"
    }:
        firsts = [by_axis(step_volumes(layout, rank)).get(axis, 0.0) for rank in (0, 4)]
        assert told[f"sent over {axis}"] == human_bytes(max(firsts))
    kept = total(saved_activations(layout.config.model, 0, Running.of(layout.config))).kept
    whole = human_bytes(kept * 2 * 16)
    assert whole in {told.get(f"kept by a layer{kind}") for kind in ("", " with experts")}


def test_counts_are_those_of_the_published_formulae() -> None:
    for tp, length in ((8, 2048), (4, 1024), (2, 512)):
        for row in activations(PRESETS["gpt3-175b"], tp, length):
            assert row.same == pytest.approx(row.published, rel=1e-12)
            assert row.own <= row.same
    each = dict(bytes_of_a_parameter(PRESETS["llama3-8b"], 4))
    assert each["ZeRO-1"][0] == pytest.approx(6 + 12 / 4, rel=1e-3)
    assert each["ZeRO-2"][0] == pytest.approx(2 + 16 / 4, rel=1e-3)
    assert each["ZeRO-3"][0] == pytest.approx(16 / 4, rel=1e-3)
    assert each["ZeRO-1"][1] == pytest.approx(4 + 12 / 4, rel=1e-3)
    assert each["ZeRO-3"][6] == pytest.approx((2 + 2 + 2 + 2 / 32) / 4, rel=1e-3)
