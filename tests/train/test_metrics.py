import math
import sys

import pytest

from fivefold.errors import ConfigError
from fivefold.hardware import peak_flops
from fivefold.train.metrics import (
    EvalMetrics,
    StepMetrics,
    TensorBoard,
    WeightsAndBiases,
    check_installed,
    close_all,
)


def step_metrics(step: int = 3, **changes) -> StepMetrics:
    values = {
        "step": step,
        "loss": 2.5,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens": 8000,
        "tokens_total": 8000 * step,
        "seconds": 2.0,
        "world_size": 4,
        "flops": 8e12,
        "peak_flops": 10e12,
        "memory_bytes": 3 << 30,
        "data_wait_seconds": 0.004,
    }
    return StepMetrics(**(values | changes))


def test_rates():
    metrics = step_metrics()
    assert metrics.tokens_per_second == 4000
    assert metrics.tokens_per_second_per_rank == 1000
    assert metrics.flops_per_second_per_rank == 1e12
    assert metrics.mfu == pytest.approx(0.1)
    assert metrics.values["mfu"] == metrics.mfu


def test_unknown_hardware_has_no_mfu():
    assert step_metrics(peak_flops=None).mfu is None
    assert "mfu" not in step_metrics(peak_flops=None).values


def test_extra_values_are_recorded():
    assert step_metrics(extra={"load_balance": 0.5}).values["load_balance"] == 0.5


def test_perplexity_does_not_overflow():
    assert EvalMetrics(1, math.log(20.0), 10, 1.0).perplexity == pytest.approx(20.0)
    assert EvalMetrics(1, 1e6, 10, 1.0).perplexity == math.inf
    assert math.isnan(EvalMetrics(1, math.nan, 10, 1.0).perplexity)


def test_tensorboard_gets_every_value(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.record(step_metrics(1))
    board.record(EvalMetrics(1, 2.0, 10, 1.0))
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = {**step_metrics(1).values, **EvalMetrics(1, 2.0, 10, 1.0).values}
    assert set(events.Tags()["scalars"]) == set(expected)
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5)]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_an_extra_that_is_not_installed(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf'pip install "fivefold\[{package}\]"'):
        check_installed(package, "a tracker")


def test_wandb_gets_steps_and_evaluations(monkeypatch, tmp_path):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finished")

    class Module:
        @staticmethod
        def init(**arguments):
            calls.append(arguments)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Module)
    run = WeightsAndBiases("project", "tiny-1", {"lr": 1.0}, tmp_path, resume=True)
    run.record(step_metrics(5))
    run.close()
    assert calls[0]["id"] == "tiny-1" and calls[0]["resume"] == "allow"
    assert calls[1:] == [(step_metrics(5).values, 5), "finished"]


def test_every_sink_is_closed_although_one_fails():
    class Sink:
        closed = False

        def record(self, metrics):
            raise NotImplementedError

        def close(self):
            self.closed = True
            raise OSError("disk full")

    sinks = [Sink(), Sink()]
    with pytest.raises(OSError, match="disk full"):
        close_all(sinks)
    assert all(sink.closed for sink in sinks)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H800", "bf16", 989),
        ("NVIDIA H800", "fp64", None),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI300X", "bf16", 1307),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA B200", "fp64", None),
        ("NVIDIA L4", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("Some CPU", "bf16", None),
    ],
)
def test_peaks_are_known_or_not_guessed(name, precision, tflops):
    assert peak_flops(name, precision) == (None if tflops is None else tflops * 1e12)
