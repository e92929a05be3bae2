"""Whole runs through the command line: resume, resharding, signals, damage, and what they say."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import kill

FIVEFOLD = [sys.executable, "-m", "fivefold"]
TINY = ["--train-iters", "6", "--save-interval", "3", "--precision", "fp64", "--seq-length", "32"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, so that nothing waits for the tokenisation of a large one."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(2000)]
    for part in range(4):
        text = "\n".join(lines[part::4])
        (folder / f"part-{part}.txt").write_text(text, encoding="utf-8")
    return folder


def command(cache: Path, run: Path, *flags: str) -> list[str]:
    data = ["--data-path", str(cache), "--data-cache-path", str(cache / "cache")]
    return [*FIVEFOLD, "train", "debug", *TINY, *data, "--save", str(run), *flags]


def train(cache: Path, run: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, or to the error."""
    return subprocess.run(
        command(cache, run, *flags), capture_output=True, text=True, timeout=200, check=False
    )


def losses(run: Path) -> list[float]:
    return kill.losses(run)


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two ranks."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    done = train(cache, run, "--nproc", "2", "--tp", "2")
    assert done.returncode == 0, done.stderr
    return run


def test_a_run_leaves_all_that_it_promises(finished: Path) -> None:
    assert (finished / "config.toml").is_file()
    environment = json.loads((finished / "environment.json").read_text())
    assert environment[0]["packages"]["torch"]
    assert (finished / "checkpoints" / "latest").read_text() == "6\n"
    steps = [json.loads(line)["step"] for line in (finished / "metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4, 5, 6]
    values = losses(finished)
    assert values[-2] < values[0]


def test_a_resumed_run_goes_on_to_the_last_bit_and_in_another_layout_to_1e_12(
    cache: Path, finished: Path, tmp_path: Path
) -> None:
    for name, flags, tolerance in (
        ("same", ["--nproc", "2", "--tp", "2"], 0.0),
        (
            "other",
            ["--nproc", "2", "--dp-shard", "2", "--data-parallel-sharding-strategy", "optim_grads"],
            1e-12,
        ),
    ):
        run = tmp_path / name
        shutil.copytree(finished, run)
        shutil.rmtree(run / "checkpoints" / "step-00000006")
        (run / "checkpoints" / "latest").write_text("3\n")
        done = train(cache, run, *flags)
        assert done.returncode == 0, done.stderr
        assert "continues after step 3" in done.stdout
        for own, true in zip(losses(run), losses(finished), strict=True):
            assert abs(own - true) <= tolerance * abs(true)


def test_sigterm_saves_the_step_and_ends_well(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "stopped"
    flags = ["--nproc", "2", "--dp-shard", "2", "--train-iters", "100000", "--save-interval", "0"]
    job = subprocess.Popen(command(cache, run, *flags), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert f"saved step {steps}" in output
    assert (run / "checkpoints" / "latest").read_text() == f"{steps}\n"


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_place(
    cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "diverged"
    done = train(
        cache, run, "--nproc", "2", "--tp", "2", "--lr", "1e300", "--lr-decay-style", "constant"
    )
    assert done.returncode != 0
    assert "is not finite" in done.stderr
    assert "rank 0 PP(0) DP(0) CP(0) TP(0)" in done.stderr
    assert "the step was not taken; latest checkpoint: none of this start" in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_runs_lose_nothing(cache: Path, finished: Path, tmp_path: Path) -> None:
    """A few kills at moments that lie all over a run; `benchmarks/kill.py` does fifty."""
    run = tmp_path / "killed"
    for moment in (1.5, 3.0, 4.5):
        job = subprocess.Popen(
            command(cache, run, "--nproc", "2", "--tp", "2"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            job.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    done = train(cache, run, "--nproc", "2", "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(finished)


def truncate(run: Path) -> None:
    (largest := max((run / "checkpoints/step-00000006").iterdir(), key=lambda p: p.stat().st_size))
    largest.write_bytes(largest.read_bytes()[:-100])


def flip(run: Path) -> None:
    largest = max((run / "checkpoints/step-00000006").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def unlink(name: str) -> object:
    return lambda run: (run / "checkpoints/step-00000006" / name).unlink()


def write(name: str, text: str) -> object:
    return lambda run: (run / "checkpoints/step-00000006" / name).write_text(text)


def nothing(run: Path) -> None:
    pass


DAMAGE = {
    "cut short": (truncate, [], "is damaged"),
    "one bit": (flip, [], "is damaged"),
    "no metadata": (unlink(".metadata"), [], "is damaged"),
    "no manifest": (unlink("manifest.json"), [], "is damaged"),
    "no meta": (unlink("meta.json"), [], "meta.json"),
    "a file is gone": (unlink("__0_0.distcp"), [], "is damaged"),
    "manifest is no json": (write("manifest.json", "{"), [], "is damaged"),
    "metadata is no pickle": (write(".metadata", "hello"), [], "is damaged"),
    "another model": (nothing, ["--ffn-hidden-size", "256"], "ffn_hidden_size: was 192, is 256"),
    "another depth": (nothing, ["--num-layers", "2"], "num_layers: was 4, is 2"),
    "other data": (nothing, ["--seq-length", "16"], "the data is not what"),
    "other seed": (nothing, ["--seed", "7"], "the data is not what"),
}


@pytest.fixture
def damaged(finished: Path, tmp_path: Path) -> Iterator[Path]:
    run = tmp_path / "damaged"
    shutil.copytree(finished, run)
    yield run


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_and_left_alone(
    cache: Path, damaged: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from fivefold.cli.main import main

    harm, flags, message = DAMAGE[kind]
    harm(damaged)  # type: ignore[operator]
    before = snapshot(damaged / "checkpoints")
    words = command(cache, damaged, "--nproc", "1", "--train-iters", "9", *flags)[3:]
    assert main(words) != 0
    errors = capfd.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert snapshot(damaged / "checkpoints") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "/no/such/run"], "there is no checkpoint in"),
        (["--load", "RUN", "--ckpt-step", "5"], "--ckpt-step 3 | --ckpt-step 6"),
        (["--load", "RUN/checkpoints/step-00000003"], "is one checkpoint, not a folder of them"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    cache: Path,
    finished: Path,
    tmp_path: Path,
    flags: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from fivefold.cli.main import main

    flags = [flag.replace("RUN", str(finished)) for flag in flags]
    assert main(command(cache, tmp_path / "new", "--nproc", "1", *flags)[3:]) != 0
    errors = capfd.readouterr().err
    assert message in errors and "Traceback" not in errors


def test_finetuning_takes_the_weights_alone(
    cache: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fivefold.cli.main import main

    run = tmp_path / "tuned"
    load = ["--load", str(finished), "--finetune", "--seed", "7", "--train-iters", "4"]
    assert main(command(cache, run, "--nproc", "1", *load)[3:]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[0]["loss"] < losses(finished)[0] - 0.1


def test_sampling_is_the_same_for_the_same_seed(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fivefold.cli.main import main

    texts = []
    for seed in ("1", "1", "2"):
        assert main(["sample", str(finished), "def ", "--max-tokens", "12", "--seed", seed]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def ")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
