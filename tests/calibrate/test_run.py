"""What is measured becomes a cluster file that the planner reads back."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.calibrate import measure, run
from fivefold.calibrate.measure import Sample, line
from fivefold.calibrate.run import Measured, as_cluster, calibrate
from fivefold.errors import ConfigError
from fivefold.predict.cluster import load_cluster
from fivefold.train.devices import Asked
from fivefold.train.rank_env import RankEnv
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
    assert cluster.network_link == cluster.node_link and cluster.num_gpus == 8


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
