"""The command, from a recipe to the exit status."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest
import torch
from safetensors import SafetensorError

from fivefold.check import check
from fivefold.cli.verify import Options, in_fp64
from fivefold.config.config import SETTINGS, Config
from fivefold.config.presets import resolve_model
from fivefold.config.sources import load
from fivefold.errors import ConfigError, DataError
from fivefold.files import telling_system_errors
from fivefold.verify.reference import ReferenceStep, load_trace, save_trace
from fivefold.verify.run import _enough_steps
from tests import programs

pytestmark = pytest.mark.slow


def verify(*argv: str) -> CompletedProcess[str]:
    return programs.run(["verify", *argv])


def test_json_and_status_of_a_layout_that_passes() -> None:
    done = verify("debug", "--nproc", "2", "--tp", "2", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and found["dtype"] == "fp64" and found["steps"] == 2
    assert found["layout"].startswith("2 ranks: tp 2, 8 microbatches")
    assert all(found["max_rel_error"][what] < 1e-12 for what in ("loss", "grad", "param"))
    assert found["worst"]["name"]


def test_a_failure_is_named_and_has_a_status() -> None:
    done = verify("debug", "--nproc", "2", "--plant", "skip-dp-sum", "--fp32")
    assert done.returncode == 1, done.stderr
    assert "the sum over data parallelism is missing" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("FAILED")


def test_a_mistake_is_told_before_anything_starts() -> None:
    done = verify("debug", "--nproc", "2", "--plant", "double-dx")
    assert done.returncode == 2
    assert "double-dx needs tensor parallelism" in done.stderr


NAMES = ("bf16", "fp32", "fp64", "precision")  # of flags without their dashes
SAME = [
    setting.typed(choice)
    for setting in SETTINGS.values()
    for choice in setting.choices
    if choice in NAMES and setting.name != "precision"
]


@pytest.mark.parametrize("flag", ["", *SAME])
def test_only_a_flag_changes_the_precision(flag: str) -> None:
    """The value of another setting may be named like a precision."""
    argv = ["debug", *flag.split()]
    assert load(in_fp64(argv), Options)[1].training.precision == "fp64"
    assert load(in_fp64([*argv, "--fp32"]), Options)[1].training.precision == "fp32"
    assert load(in_fp64([*argv, "--precision=bf16"]), Options)[1].training.precision == "bf16"


def a_step() -> ReferenceStep:
    """Of a layer's experts, with a tensor of which every other element is kept."""
    part = {"x": torch.arange(6.0).reshape(2, 3).T, "y": torch.zeros(0)}
    numbers = {"loss": 0.1, "norm": float("inf"), "evaluation": 1e-300, "further": {"mtp_1": 0.3}}
    rest = {
        "losses": torch.ones(4)[::2],
        "loads": torch.zeros(0),
        "choices": {"11.router": torch.ones(2)},
    }
    return ReferenceStep(**numbers, **rest, grads=part, before={}, after={"a/b": part["x"]})


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_trace(tmp_path / "trace", [a_step() for _ in range(11)])
    read = load_trace(tmp_path / "trace")
    assert len(read) == 11
    for step in read:
        torch.testing.assert_close(vars(step), vars(a_step()), rtol=0, atol=0)


def test_a_full_disk_is_told_of_a_reference(tmp_path: Path) -> None:
    full = SafetensorError("Error: No space left on device (os error 28)")
    with (
        pytest.raises(DataError, match=f"disk full: cannot write {tmp_path}"),
        patch("safetensors.torch.save_file", side_effect=full),
        telling_system_errors(DataError, tmp_path),
    ):
        save_trace(tmp_path / "trace", [a_step()])


def test_a_graph_is_proved_by_a_step_that_replays_it_with_other_tokens() -> None:
    """The one that is recorded replays its own."""
    plain = Config(resolve_model("debug-llama")).with_values(reset_attention_mask=False)
    graphs = check(plain.with_values(cuda_graph_impl="local"), 1)
    assert _enough_steps(check(plain, 1), None) == 3
    assert _enough_steps(check(plain, 1), 1) == 1
    assert _enough_steps(graphs, None) == _enough_steps(graphs, 4) == 4
    with pytest.raises(ConfigError, match="--steps 4"):
        _enough_steps(graphs, 3)
