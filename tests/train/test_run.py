"""Whole runs through the command line: resume, resharding, signals, damage, and what they say."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import psutil
import pytest
from torch.distributed import run as elastic

from benchmarks import kill
from benchmarks.peers import free_port
from fivefold.cli.main import main
from fivefold.train.folder.lock import FILE, RunLock, claim
from fivefold.train.folder.save_interval import SaveInterval
from tests import programs
from tests.checkpoint.forge import Call, forge
from tests.cli.advice import Line, read_message, type_suggestion
from tests.verify.cases import chosen

pytestmark = pytest.mark.slow

FIVEFOLD = [sys.executable, "-m", "fivefold"]
TWO = ("--nproc", "2", "--tp", "2")
TINY = ["--train-iters", "6", "--save-interval", "3", "--precision", "fp64", "--seq-length", "32"]
TINY += ["--num-layers", "2", "--global-batch-size", "2"]


def command(cache: Path, run: Path, *flags: str) -> list[str]:
    data = ["--data-path", str(cache), "--data-cache-path", str(cache / "cache")]
    return [*FIVEFOLD, "train", "debug", *TINY, *data, "--save", str(run), *flags]


def train(cache: Path, run: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, or to the error."""
    return programs.run(command(cache, run, *flags)[3:])


def losses(run: Path) -> list[float]:
    return kill.losses(run)


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
    job = programs.start(command(cache, run, *flags)[3:])
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
    assert done.returncode == 1
    assert "is not finite" in done.stderr
    assert "rank 0 PP(0) DP(0) CP(0) TP(0)" in done.stderr
    assert "the step was not taken; latest checkpoint: none of this start" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_learns_nothing_more_says_so_and_stops(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fivefold.cli.main import main

    words = command(cache, tmp_path / "dead", "--nproc", "1", "--lr", "100")[3:]
    words += ["--precision", "fp32", "--train-iters", "14"]
    assert main(words) == 1  # as of a rank that the launcher started: no setting is refused
    said = capfd.readouterr()
    assert "warning: step 6: the gradient is exactly 0\n" in said.out
    assert "error: step 10: the gradient is exactly 0, for the 5th step in a row" in said.err
    assert "the loss is ln 512 = 6.2383" in said.err and "such as --lr 10," in said.err
    steps = len((tmp_path / "dead" / "metrics.jsonl").read_text().splitlines())
    kept = [path.name for path in (tmp_path / "dead" / "checkpoints").glob("step-*")]
    assert steps == 10 and kept == ["step-00000003"]


def test_without_the_check_a_dead_run_is_warned_of_only(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from fivefold.cli.main import main

    words = command(cache, tmp_path / "dead", "--nproc", "1", "--lr", "100")[3:]
    words += ["--precision", "fp32", "--train-iters", "11", "--no-check-for-nan-in-loss-and-grad"]
    assert main(words) == 0
    assert capfd.readouterr().out.count("warning: step 6: the gradient is exactly 0\n") == 1


def test_killed_runs_lose_nothing(cache: Path, finished: Path, tmp_path: Path) -> None:
    """Kills at its start, after a step and while it saves; `benchmarks/kill.py` does fifty."""
    run, killed = tmp_path / "killed", 0
    began = time.monotonic()
    moments: tuple[Callable[[], object], ...] = (
        lambda: time.monotonic() > began + 0.5,
        lambda: [file for file in run.glob("metrics.jsonl") if file.read_bytes()],
        lambda: [*run.glob("checkpoints/*/__*")],
    )
    for is_moment in moments:
        job = programs.start(command(cache, run, *TWO)[3:], own_session=True)
        while job.poll() is None and not is_moment():
            time.sleep(0.005)
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        killed += job.wait() == -signal.SIGKILL
    assert killed > 1  # the last of them may have been done
    done = train(cache, run, "--nproc", "2", "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert losses(run) == losses(finished)


def started(cache: Path, run: Path, *flags: str) -> programs.Program:
    """A long run, when it has done its first step."""
    long = ["--train-iters", "100000", "--lr-decay-style", "constant", *flags]
    job = programs.start(command(cache, run, *long)[3:])
    wait_for(run / "metrics.jsonl", job)
    return job


def wait_for(file: Path, job: subprocess.Popen[str] | programs.Program) -> None:
    """Until there is something in it."""
    deadline = time.monotonic() + 100
    while not file.exists() or not file.read_bytes():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_folder_that_is_moved_under_several_ranks_ends_them(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = started(cache, run, "--nproc", "2", "--tp", "2", "--save-interval", "2")
    run.rename(tmp_path / "away")
    _, errors = job.communicate(timeout=60)
    assert job.returncode not in (0, -signal.SIGKILL)
    assert "Traceback" not in errors and str(run) in errors, errors
    assert "while the run went on" in errors or "saving step" in errors, errors


@pytest.mark.parametrize("ranks", chosen(["forked", "interpreters"], "forked"))
def test_ranks_of_torchrun_have_one_owner_and_a_second_start_is_refused(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: str
) -> None:
    run = tmp_path / "run"
    words = command(cache, run, "--tp", "2", "--save-interval", "0", "--train-iters", "100000")[3:]
    torchrun = ["--standalone", "--nproc-per-node", "2", "-m", "fivefold", *words]
    forked = (programs.torchrun, 2, programs.fivefold, words)
    first = programs.Program(*(forked if ranks == "forked" else (elastic.main, torchrun)))
    wait_for(run / "metrics.jsonl", first)
    owner = json.loads((run / FILE).read_text())["pid"]
    started_ranks = psutil.Process(first.pid).children()
    assert owner in [rank.pid for rank in started_ranks]
    for rank in started_ranks:  # which need not compute meanwhile
        rank.suspend()
    assert main(command(cache, run, "--nproc", "2", "--tp", "2")[3:]) == 2
    assert f"in use by process {owner} on" in capfd.readouterr().err
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    each = [env | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]  # as torchrun starts them
    wrong = ["--seq-length", "0"]  # which each rank finds by itself, before it meets others
    for told, flags in (
        (f"in use by process {owner} on", []),
        ("seq_length must be at least 1", wrong),
    ):
        again = [programs.start([*words, *flags], env=of) for of in each]
        errors = [rank.communicate(timeout=100)[1] for rank in again]
        assert all(rank.returncode for rank in again)
        assert "".join(errors).count(told) == 1
    for rank in started_ranks:
        rank.resume()
    first.terminate()
    first.communicate(timeout=60)
    assert not (run / FILE).exists()


@pytest.mark.exhaustive  # test_lock.py has many claims at once
def test_of_runs_that_start_at_once_in_one_folder_one_goes_on(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs = [
        subprocess.Popen(
            command(cache, run, "--nproc", "2", "--tp", "2", "--train-iters", "40"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [job.communicate(timeout=200) for job in jobs]
    (winner,) = [job for job in jobs if job.returncode == 0]
    for job, (_, errors) in zip(jobs, said, strict=True):
        assert job is winner or f"in use by process {winner.pid} on" in errors
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == list(range(1, 41))
    assert len(json.loads((run / "environment.json").read_text())) == 1


def during(run: Path, after: int, act: Callable[[], object]) -> threading.Thread:
    """A thread that acts when a run has recorded so many steps."""

    def watch() -> None:
        file = run / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not file.exists() or file.read_bytes().count(b"\n") < after:
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


LONG = ["--nproc", "1", "--train-iters", "100000", "--lr-decay-style", "constant"]


HARMS = ("deleted", "moved", "emptied", "replaced")


@pytest.mark.parametrize(
    ("harm", "interval"),
    [
        pytest.param(*case, marks=pytest.mark.exhaustive) if case[1] == "1" else case
        for case in product(HARMS, "01")
        if case != ("emptied", "1")
    ]
    + [("emptied", "1")],
)
def test_what_happens_to_a_folder_under_a_run_is_told(
    cache: Path, tmp_path: Path, harm: str, interval: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run, away = tmp_path / "run", tmp_path / "away"

    def act() -> None:
        if harm == "emptied":
            for path in run.iterdir():
                shutil.rmtree(path, True) if path.is_dir() else path.unlink(missing_ok=True)
            return
        run.rename(away)
        if harm == "replaced":
            run.mkdir()
        if harm in ("deleted", "replaced"):
            shutil.rmtree(away, ignore_errors=True)

    thread = during(run, 3, act)
    status = main(command(cache, run, *LONG, "--save-interval", interval)[3:])
    thread.join()
    errors = capfd.readouterr().err
    # A save under way may miss its files before the lock, which is removed after them.
    told = "while the run went on" in errors
    assert told or (harm == "emptied" and "saving step" in errors), errors
    assert status == (1 if told else 2)
    assert "Traceback" not in errors
    if harm == "moved":
        assert f"was moved to {away}" in errors
    if interval == "0":  # else a save that was under way may have made its folder again
        assert run.exists() == (harm in ("emptied", "replaced"))


def test_deleted_metrics_are_made_again(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    thread = during(run, 3, lambda: (run / "metrics.jsonl").unlink())
    assert main(command(cache, run, "--nproc", "1", "--train-iters", "14")[3:]) == 0
    thread.join()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == list(range(1, 15))


def test_a_signal_before_the_first_step_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fivefold.train.run.open_data", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as leaving:
        main(command(cache, tmp_path / "run", "--nproc", "1")[3:])
    assert leaving.value.code == 128 + signal.SIGTERM
    assert snapshot(tmp_path) == {}


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


def environment(text: str) -> object:
    return lambda run: (run / "environment.json").write_text(text)


def owned(run: Path) -> RunLock:
    """By this test."""
    lock = claim(run)
    lock.begin()
    return lock


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
    "another depth": (nothing, ["--num-layers", "3"], "num_layers: was 2, is 3"),
    "other data": (nothing, ["--seq-length", "16"], "the data is not what"),
    "other seed": (nothing, ["--seed", "7"], "the data is not what"),
    "fewer steps": (nothing, ["--train-iters", "4"], "is at step 6, and train_iters is 4"),
    "an impossible layout": (nothing, ["--tp", "3"], "cannot be split"),
    "no corpus": (nothing, ["--data-path", "gone"], "no such file or folder: gone"),
    "a long warm-up": (nothing, ["--lr-warmup-iters", "99"], "--lr-decay-iters 990"),
    "no W&B": (nothing, ["--wandb-project", "x"], "wandb is not installed"),
    "empty environment": (environment(""), [], "environment.json is not JSON"),
    "environment of text": (environment('["a"]'), [], "environment.json does not hold what"),
    "deep environment": (environment('[{"a":' * 5000), [], "environment.json is nested too deep"),
    "in use": (owned, [], f"is in use by process {os.getpid()} on"),
}


@pytest.fixture
def damaged(finished: Path, tmp_path: Path) -> Path:
    """A run with a single checkpoint, to which harm can be done."""
    run = tmp_path / "damaged"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("step-00000003"))
    (tmp_path / "latest").symlink_to("another")
    return run


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_run_that_cannot_go_on_is_refused_and_its_folder_left_alone(
    cache: Path,
    damaged: Path,
    kind: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    harm, flags, message = DAMAGE[kind]
    held = harm(damaged)  # type: ignore[operator]
    with held if isinstance(held, RunLock) else nullcontext():
        before = snapshot(damaged.parent)
        words = command(cache, damaged, "--nproc", "1", "--train-iters", "9", *flags)[3:]
        assert main(words) != 0
        errors = capfd.readouterr().err
        assert message in errors and "Traceback" not in errors
        assert snapshot(damaged.parent) == before


@pytest.mark.parametrize("kind", chosen(["one bit", "no meta", "no manifest"], "one bit"))
def test_a_run_goes_on_from_the_latest_intact_checkpoint_and_says_so(
    cache: Path, finished: Path, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    DAMAGE[kind][0](run)  # type: ignore[operator]
    words = command(cache, run, "--nproc", "2", "--tp", "2", "--train-iters", "7")
    assert main([*words[3:], "--lr-decay-iters", "6"]) == 0
    said = capfd.readouterr()
    assert "step-00000006 is damaged: " in said.out and "continues after step 3" in said.out
    assert "step 3 is the latest that is intact" in said.out
    before = losses(finished)
    assert losses(run)[: len(before)] == before


def test_a_finished_run_has_nothing_left_to_do(
    cache: Path, damaged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(damaged.parent)
    assert main(command(cache, damaged, "--nproc", "1")[3:]) == 0
    assert f"{damaged} has done its 6 steps" in capfd.readouterr().out
    assert snapshot(damaged.parent) == before


def test_a_run_that_was_killed_as_it_ended_leaves_nothing_once_it_is_started_again(
    cache: Path, damaged: Path
) -> None:
    before = snapshot(damaged.parent)
    script = "import os, sys, signal\nfrom pathlib import Path\n"
    script += "from fivefold.train.folder.lock import claim\nlock = claim(Path(sys.argv[1]))\n"
    script += "lock.begin()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    subprocess.run([sys.executable, "-c", script, str(damaged)], check=False)
    removed = damaged / "checkpoints" / "step-00000003-0123abcd.tmp"  # as it made way for another
    shutil.copytree(damaged / "checkpoints" / "step-00000006", removed)
    assert snapshot(damaged.parent) != before and (damaged / "run.lock").exists()
    assert main(command(cache, damaged, "--nproc", "1")[3:]) == 0
    assert snapshot(damaged.parent) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load", "nope"], "there is no checkpoint in nope: no such folder"),
        (["--load", "finishd"], "did you mean 'finished'?"),
        (["--load", "finished"], "is at step 6, and train_iters is 6"),
        (["--load", "finished", "--num-layers", "3", "--finetune"], "num_layers: was 2, is 3"),
        (["--load", "finished", "--seed", "7", "--train-iters", "9"], "the data is not what"),
        (["--load", ""], "load is empty"),
        (["--save", ""], "save is empty"),
        (["--save", " "], "save is empty"),
        (["--save", "file"], "file is not a folder"),
        (["--save", "file/run"], "file is not a folder"),
        (["--save", "broken"], "broken is a link to nothing"),
        (["--save", "lost"], "save = lost: lost/checkpoints is a link to nothing"),
        (["--save", "/proc/run"], "cannot write the run folder /proc/run"),
        (["--save", "new/" + "x" * 300], "File name too long"),
        (["--wandb-project", "x"], "wandb is not installed"),
        (["--tensorboard"], "tensorboard is not installed"),
        (["--tokenizer-model", "gone.json"], "gone.json"),
        (["--split", "0,0,100"], "split"),
    ],
)
@pytest.mark.parametrize("save", [["--save", "deep/er/run"], []], ids=["named", "new"])
def test_a_run_that_never_starts_leaves_nothing(
    cache: Path,
    finished: Path,
    tmp_path: Path,
    flags: list[str],
    message: str,
    save: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "finished").symlink_to(finished)
    (tmp_path / "broken").symlink_to("nowhere/at/all")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "checkpoints").symlink_to("disk/that/is/gone")
    (tmp_path / "file").write_text("text")
    before = snapshot(tmp_path)
    words = command(cache, tmp_path, "--nproc", "1")[3:-2]
    assert main([*words, *save, *flags]) == 2
    errors = capfd.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("way", ["sample", "--save", "--load", "--finetune"])
def test_no_way_of_reading_a_checkpoint_runs_what_it_holds(
    cache: Path, damaged: Path, tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    payload = Call(os.system, f"touch {marker}")
    pickle.loads(pickle.dumps(payload))
    marker.unlink()  # it does harm: this test can fail
    forge(damaged / "checkpoints/step-00000006", ".metadata", pickle.dumps([payload]))
    load = ["--load", str(damaged)] + ["--finetune"] * (way == "--finetune")
    words = {
        "sample": ["sample", str(damaged), "def "],
        "--save": command(cache, damaged, "--nproc", "1", "--train-iters", "9")[3:],
    }.get(way, command(cache, tmp_path / "new", "--nproc", "1", "--train-iters", "9", *load)[3:])
    assert main(words) != 0
    errors = capfd.readouterr().err
    assert ".metadata names 'posix.system', which no checkpoint does" in errors
    assert "Traceback" not in errors and not marker.exists()


def test_a_state_that_is_not_of_its_folder_is_refused(
    cache: Path, damaged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = damaged / "checkpoints/step-00000006"
    state = json.loads((checkpoint / "meta.json").read_text())
    resume = command(cache, damaged, "--nproc", "1", "--train-iters", "9")[3:]
    for changed, says in (
        ({**state, "step": 9999}, "it is of step 9999"),
        ({**state, "step": "6"}, "Expected `int`, got `str` - at `$.step`"),
        ({**state, "model": None}, "at `$.model`"),
        ({**state, "model": {**state["model"], "rotary_base": 7}}, "rotary_base: was 7"),
        ({**state, "loader": {**state["loader"], "consumed_samples": 1e300}}, "consumed_samples"),
        ({**state, "loader": {**state["loader"], "consumed_samples": 5}}, "5 samples cannot be"),
    ):
        forge(checkpoint, "meta.json", json.dumps(changed).encode())
        for words in (resume, ["sample", str(damaged), "def "]):
            assert main(words) != 0
            errors = capfd.readouterr().err
            assert says in errors and "Traceback" not in errors


@pytest.mark.parametrize("flag", ["--async-save", "--no-async-save"])
def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    cache: Path,
    finished: Path,
    tmp_path: Path,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a limit of the process, which no free space tells of before.

    No second save waits for the first, so that only its failure can stop the run.
    """
    monkeypatch.setattr(SaveInterval, "due", lambda _, step: step == 9)
    run = shutil.copytree(finished, tmp_path / "full")
    words = command(cache, run, "--nproc", "1", "--train-iters", "400", flag)[3:]
    before = snapshot(run / "checkpoints")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert main(words) != 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = capfd.readouterr().err
    assert f"disk full: saving step 9 to {run}/checkpoints failed" in errors
    assert "bytes needed" in errors and "bytes free" in errors and "200,000 bytes (ulimit" in errors
    assert "free space there, or a higher limit, then the same command" in errors
    assert "goes on from the checkpoint of step 6" in errors and "Traceback" not in errors
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert steps == 9 if flag == "--no-async-save" else 9 <= steps < 400
    assert snapshot(run / "checkpoints") == before
    assert main([*words, "--train-iters", "9", "--lr-decay-iters", "400"]) == 0


def test_a_disk_that_is_known_to_be_full_stops_the_run_in_the_step_that_saves(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fivefold.checkpoint.checkpointer.free_bytes", lambda _: 1_000_000)
    assert main(command(cache, tmp_path / "full", "--nproc", "1", "--async-save")[3:]) != 0
    assert "disk full: saving step 3" in capfd.readouterr().err
    assert len((tmp_path / "full" / "metrics.jsonl").read_text().splitlines()) == 3


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
    flags = [flag.replace("RUN", str(finished)) for flag in flags]
    assert main(command(cache, tmp_path / "new", "--nproc", "1", *flags)[3:]) != 0
    errors = capfd.readouterr().err
    assert message in errors and "Traceback" not in errors


def test_finetuning_takes_the_weights_alone(
    cache: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "tuned"
    load = ["--load", str(finished), "--finetune", "--seed", "7", "--train-iters", "4"]
    assert main(command(cache, run, "--nproc", "1", *load)[3:]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[0]["loss"] < losses(finished)[0] - 0.1


def test_sampling_is_the_same_for_the_same_seed(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["sample", str(finished), "def ", "--max-tokens", "12", "--seed", seed]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("def ")


def snapshot(folder: Path) -> dict[str, object]:
    """Everything below a folder: contents of files, targets of links, None of folders."""
    return {
        str(p.relative_to(folder)): os.readlink(p)
        if p.is_symlink()
        else p.read_bytes()
        if p.is_file()
        else None
        for p in folder.rglob("*")
    }


def test_sampling_advises_its_own_flag_before_it_writes(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", str(finished), "def ", "--max-tokens", "2"]
    assert main([*words, "--step", "5"]) == 2
    told = capfd.readouterr()
    assert not told.out
    (mistake,) = read_message(told.err)
    assert mistake.suggestions == ("--step 3", "--step 6")
    for suggestion in mistake.suggestions:
        assert main([*words, *suggestion.split()]) == 0


NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --precision bf16"


GOES_ON = [*product(["--seed 7", "--optimizer muon", NARROW], ["load", "resume"])]


@pytest.mark.parametrize(
    ("differs", "way"),
    [
        case if place in (1, 3) else pytest.param(*case, marks=pytest.mark.exhaustive)
        for place, case in enumerate(GOES_ON)
    ],
)
def test_a_checkpoint_that_cannot_be_gone_on_with_says_how_to_keep_its_weights(
    differs: str,
    way: str,
    cache: Path,
    damaged: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    save = tmp_path / "new" if way == "load" else damaged
    words = command(cache, save, "--nproc", "1", "--train-iters", "9", *differs.split())[3:]
    words += ["--load", str(damaged)] if way == "load" else []
    assert main(words) == 2
    (mistake,) = read_message(capfd.readouterr().err.partition("error: ")[2])
    assert any("--finetune" in suggestion for suggestion in mistake.suggestions)
    for suggestion in mistake.suggestions:
        typed = type_suggestion(Line(tuple(words)), mistake, suggestion)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        assert main(list(typed.argv)) == 0, suggestion
