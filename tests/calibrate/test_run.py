"""What is measured becomes a cluster file that the planner reads back."""

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch

from fivefold.calibrate import measure, run
from fivefold.calibrate.measure import Sample, line
from fivefold.calibrate.run import Measured, as_cluster, calibrate
from fivefold.errors import ConfigError
from fivefold.predict.cluster import Cluster, preset
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.times.communication import GroupSpan, all_reduce, gather
from fivefold.predict.times.compute import attention, elementwise, matmul
from fivefold.train.machine.devices import Asked
from fivefold.train.ranks.rank_env import RankEnv
from tests.pool import Pool


def test_a_line_is_found_through_times_over_four_orders_of_magnitude() -> None:
    samples = [Sample("", size, 5e-6 + size / 2e9) for size in (1e3, 1e5, 1e7)]
    latency, rate = line(samples)
    assert latency == pytest.approx(5e-6) and rate == pytest.approx(2e9)


def test_noise_makes_no_negative_latency_and_no_negative_rate() -> None:
    latency, rate = line([Sample("", 1e6, 1e-4), Sample("", 2e6, 4e-4)])
    assert latency == 0.0 and 0 < rate < 1e10
    latency, rate = line([Sample("", 1e6, 4e-4), Sample("", 2e6, 1e-4)])
    assert latency == 0.0 and rate == pytest.approx(2e10)


def measured(device: str, precision: str) -> Measured:
    sends = tuple(Sample("", size, 1e-5 + size / 3e11) for size in (1e4, 1e8))
    return Measured(
        kind="cpu" if device.startswith("CPU") else "cuda",
        device=device,
        precision=precision,
        memory_bytes=8e10,
        host_memory_bytes=2e12,
        multiprocessors=132,
        matmuls={
            "bf16": (Sample("", 1e12, 2e-3), Sample("", 8e12, 1e-2)),
            "fp32": (Sample("", 1e12, 2e-2),),
            "fp64": (Sample("", 1e12, 4e-2),),
        },
        attention=(Sample("", 2e11, 4e-4), Sample("", 5e11, 1e-3)),
        traffic=Sample("", 3e9, 1e-3),
        launch=Sample("", 100, 4e-4),
        host=Sample("", 300, 6e-3),
        copy=Sample("", 5e9, 0.1),
        node=sends,
        network=(),
        sustained=0.9,
        jitter=0.01,
        ranks=8,
        ranks_per_node=8,
    )


def test_a_known_device_keeps_its_data_sheet() -> None:
    cluster = as_cluster(measured("NVIDIA H100 80GB HBM3", "bf16"))
    gpu = cluster.gpu
    assert (gpu.name, gpu.peak.bf16, gpu.matmul.bf16, gpu.matmul.fp8) == (
        "H100",
        989e12,
        8e14,
        1403e12,
    )
    assert gpu.memory_efficiency == pytest.approx(3e12 / 3.35e12)
    # As on sequences of any length, of which 8,192 tokens reach 8192 / (8192 + 384).
    assert gpu.attention_forward == pytest.approx(5e14 / 989e12 * 8576 / 8192)
    assert gpu.launch == pytest.approx(4e-6)
    assert cluster.host_operation == pytest.approx(2e-5)
    assert cluster.node_link.rate == pytest.approx(3e11)
    assert cluster.num_gpus == 8 and cluster.host_memory_bytes == 2e12
    # What is not measured is that of the table.
    assert cluster.network_link == preset("H100").network_link
    usual = preset("H100").gpu
    assert replace(usual, **{name: getattr(gpu, name) for name in MEASURED}) == gpu


MEASURED = (
    *("memory_bytes", "matmul", "multiprocessors", "sustained", "launch", "memory_efficiency"),
    *("attention_forward", "attention_backward"),
)


def measured_on(cluster: Cluster, device: str) -> Measured:
    """What would be measured on a cluster if kernels and messages took the times that are predicted
    for it."""
    size, gpu = cluster.gpus_per_node, replace(cluster.gpu, sustained=1.0)

    def messages(ranks: int, inner: int) -> tuple[Sample, ...]:
        group, clock = MagicMock(), MagicMock(side_effect=lambda call, *rest: call())
        group.size.return_value = ranks
        ways: dict[str, Callable[[torch.Tensor, object], float]] = {
            "all_gather": lambda x, _: gather(cluster, span, ranks * x.numel() * 4.0),
            "reduce_scatter": lambda x, _: gather(cluster, span, x.numel() * 4.0),
            "all_reduce": lambda x, _: all_reduce(cluster, span, x.numel() * 4.0),
        }
        span = GroupSpan(ranks, inner)
        with patch.multiple(measure, clock=clock, **ways):
            return measure.collectives(torch.device("meta"), group) if ranks > 1 else ()

    shapes, length = measure.SHAPES["cuda"], measure.SEQUENCE["cuda"]
    flops = 2.0 * length * length * measure.HEADS * measure.HEAD_DIM
    both = attention(gpu, flops, length)
    return replace(
        measured(device, "bf16"),
        matmuls={
            name: tuple(
                Sample("", 2.0 * m * n * k, matmul(gpu, m, n, k, name)) for m, n, k in shapes
            )
            for name in ("bf16", "fp32", "fp64")
        },
        multiprocessors=gpu.multiprocessors,
        attention=(Sample("", flops, both.forward), Sample("", 2.5 * flops, both.dx)),
        traffic=Sample("", 1e10, elementwise(gpu, 1e10, 0)),
        launch=Sample("", 100, 100 * gpu.launch),
        node=messages(size, size),
        network=messages(cluster.nodes, 1),
        sustained=cluster.gpu.sustained,
        ranks=cluster.num_gpus,
        ranks_per_node=size,
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("name", "gpus", "each"), [("H100", 32, 8), ("A100-80", 24, 3), ("B200", 8, 2), ("L40S", 4, 4)]
)
def test_what_was_measured_is_predicted(name: str, gpus: int, each: int, known: bool) -> None:
    """On a device that the table has, and on one that it has not."""
    truth = replace(preset(name, gpus), gpus_per_node=each)
    found = as_cluster(measured_on(truth, name if known else "Some GPU"))
    for shape in (*measure.SHAPES["cuda"], (8192, 28672, 8192)):
        times = [matmul(cluster.gpu, *shape, "bf16") for cluster in (found, truth)]
        assert times[0] == pytest.approx(times[1], rel=0.12), shape
    groups = [GroupSpan(each, each), GroupSpan(gpus // each, 1), GroupSpan(gpus, each)]
    for group in groups:
        for size in (*measure.MESSAGES, 1 << 30):
            for way in (gather, all_reduce):
                times = [way(cluster, group, size) for cluster in (found, truth)]
                assert times[0] == pytest.approx(times[1], rel=0.25), (way, group, size)


def test_what_a_cpu_has_free_is_all_that_there_is(tmp_path: Path) -> None:
    """However little: what is written can be read, and tensors have room."""
    path = tmp_path / "cluster.toml"
    for memory, jitter in ((1e8, 0.0), (2e9, 3.5)):
        told = replace(measured("CPU", "fp32"), memory_bytes=memory, jitter=jitter)
        path.write_text(run.to_toml(as_cluster(replace(told, host_memory_bytes=0.0))))
        cluster = load_cluster(path)
        assert cluster.room == pytest.approx(0.95 * memory)
        assert cluster.host_memory_bytes is not None and cluster.host_memory_bytes < memory / 50
    env = RankEnv(0, 0, 2, 2)
    assert 0 < 2 * run._memory(env, torch.device("cpu")) <= run._host_memory()


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 MIG 3g.40gb"])
def test_a_part_of_a_gpu_is_no_gpu_of_the_table(name: str) -> None:
    assert as_cluster(measured(name, "bf16")).gpu.peak.fp8 is None


def test_attention_of_an_unknown_gpu_was_measured_on_sequences_of_gpus() -> None:
    gpu = as_cluster(measured("Some GPU", "bf16")).gpu
    assert gpu.name == "Some GPU" and gpu.peak == gpu.matmul
    assert gpu.attention_forward == pytest.approx(5e14 / 8e14 * 8576 / 8192)


def test_an_unknown_device_is_its_own_data_sheet(tmp_path: Path) -> None:
    cluster = as_cluster(measured("CPU, 1 threads a rank", "fp32"))
    assert cluster.gpu.peak == cluster.gpu.matmul and cluster.gpu.memory_efficiency == 1.0
    assert cluster.gpu.attention_backward == pytest.approx(5e14 / 5e13 * 1408 / 1024)
    path = tmp_path / "cluster.toml"
    path.write_text(run._head(measured("CPU", "fp32")) + run.to_toml(cluster))
    assert load_cluster(path) == cluster


@pytest.mark.slow
def test_ranks_measure_together(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    pool.run(2, _calibrate, path)
    cluster = load_cluster(path)
    assert cluster.num_gpus == cluster.gpus_per_node == 2
    assert cluster.gpu.matmul.of("fp32") > 1e8 and cluster.node_link.bandwidth > 1e5
    assert 1e-7 < cluster.host_operation < 1e-2


def _calibrate(rank: int, world_size: int, path: Path) -> None:
    env = RankEnv(rank, rank, world_size, world_size)
    small = {"cpu": ((64, 64, 64), (128, 128, 128))}
    with (
        patch.multiple(measure, SECONDS=0.0, SUSTAINED_SECONDS=0.0, SHAPES=small),
        patch.multiple(measure, BUFFER={"cpu": 1 << 16}, MESSAGES=(4096, 65536)),
        patch.object(run, "init_process_group", lambda env, kind: run.torch.device(kind)),
        redirect_stdout(StringIO()),
    ):
        run._calibrate_on_rank(env, path=path, kind="cpu")


def test_nowhere_to_write_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        calibrate(tmp_path / "no" / "cluster.toml", None)


@pytest.mark.parametrize(
    ("asked", "nproc", "gpus", "kind"),
    [("auto", 2, 2, "cuda"), ("auto", 4, 1, "cpu"), ("cpu", 1, 8, "cpu"), ("cuda", 1, 8, "cuda")],
)
def test_what_is_measured_is_what_ranks_train_on(
    asked: Asked, nproc: int, gpus: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int]] = []
    monkeypatch.setattr(run, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(
        run, "launch_local", lambda worker, ranks: started.append((worker.keywords["kind"], ranks))
    )
    calibrate(tmp_path / "cluster.toml", nproc, asked)
    assert started == [(kind, nproc)]


def test_ranks_that_share_a_gpu_do_not_measure_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "visible_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"4 ranks share .*\n  works: --nproc 1 | --device cpu"):
        calibrate(tmp_path / "cluster.toml", 4, "cuda")
