"""ClusterJob files are run, with stand-ins for the cluster's commands, and read by its schema."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fivefold.cli.main import main
from fivefold.config.sources import read_config, recipe_names
from fivefold.errors import ConfigError
from fivefold.jobs.job import STOP_SECONDS, ClusterJob, job_name, read_limit
from fivefold.jobs.kubernetes import train_job
from fivefold.jobs.ray import ray_script
from fivefold.jobs.skypilot import sky_task
from fivefold.jobs.slurm import sbatch_file

ODD = [
    'quote"s',
    "dollar$HOME",
    "$(HOME)",
    "a$$b",
    "back\\slash",
    "RECIPE",
    "`tick`",
    "line'quote",
    'three"""quotes',
]


def job_of(recipe: str = "debug", **values: Any) -> ClusterJob:
    config = read_config(recipe, **values)
    where = {"image": "registry/fivefold:1", "volume": ("claim", "/shared")}
    return ClusterJob("a-job", config, 2, 4, "H100", timedelta(hours=24), 3, **where)


def started(job_file: str) -> str:
    """The script that a pod runs: Kubernetes replaces variables in a command before that."""
    command = yaml.safe_load(job_file)["spec"]["trainer"]["command"][2]
    known = re.compile(r"\$(\$|\((\w+)\))")
    return known.sub(lambda m: "$" if m[1] == "$" else os.environ.get(m[2], m[0]), command)


def stand_in(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def ran(script: str, folder: Path, command: str, **variables: str) -> tuple[list[str], str]:
    """What a script gives a command of the cluster, and the recipe that it names then."""
    recipe = f'for w in "$@"; do case "$w" in *.toml) cat "$w" > {folder}/recipe;; esac; done'
    stand_in(folder, command, f'printf "%s\\n" "$@" > {folder}/words; {recipe}')
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", script], env=os.environ | variables | {"PATH": path}, cwd=folder, check=True
    )
    return (folder / "words").read_text().splitlines(), (folder / "recipe").read_text()


def same_settings(recipe: str, job: ClusterJob, folder: Path, **others: Any) -> None:
    path = folder / "read.toml"
    path.write_text(recipe)
    assert read_config(path) == job.config.with_values(**others)


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_job_trains_with_the_settings_of_the_recipe(recipe: str, tmp_path: Path) -> None:
    job = job_of(recipe)
    words, text = ran(sbatch_file(job), tmp_path, "srun", SLURM_JOB_ID="7")
    assert words[1:3] == ["fivefold", "train"]
    assert words[3:] == ["runs/a-job-7.toml", "--device", "cuda", "--save", "runs/a-job-7"]
    same_settings(text, job, tmp_path)


def test_ranks_get_the_processors_that_sbatch_was_asked_for(tmp_path: Path) -> None:
    words, _ = ran(
        sbatch_file(job_of()), tmp_path, "srun", SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="6"
    )
    assert words[1:4] == ["--cpus-per-task=6", "fivefold", "train"]


@pytest.mark.parametrize("target", ["kubernetes", "skypilot"])
def test_torchrun_lets_ranks_save_as_long_as_a_pod_lives(target: str, tmp_path: Path) -> None:
    """Its own patience is half a minute."""
    of_pods = target == "kubernetes"
    script = started(train_job(job_of())) if of_pods else yaml.safe_load(sky_task(job_of()))["run"]
    stand_in(tmp_path, "torchrun", 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"')
    path = f"{tmp_path}:{os.environ['PATH']}"
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a"}
    said = subprocess.check_output(["bash", "-c", script], env=os.environ | sky | {"PATH": path})
    assert 0.9 * STOP_SECONDS < int(said) < STOP_SECONDS


@pytest.mark.parametrize("odd", ODD)
def test_no_setting_ends_a_job_file_early(odd: str, tmp_path: Path) -> None:
    job = job_of(data_path=(odd,), save=f"/runs/{odd}")
    for kind, (script, command) in {
        "slurm": (sbatch_file(job), "srun"),
        "kubernetes": (started(train_job(job)), "torchrun"),
        "skypilot": (yaml.safe_load(sky_task(job))["run"], "torchrun"),
    }.items():
        variables = {"SLURM_JOB_ID": "7", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
        words, text = ran(
            script, tmp_path, command, **variables, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2"
        )
        same_settings(text, job, tmp_path)
        assert "--save" not in words, kind
        if kind == "skypilot":
            assert words[words.index("--master_addr") + 1] == "10.0.0.1"
            assert words[words.index("--node_rank") + 1] == "1"
    names: dict[str, Any] = {"__name__": "job"}
    source = ray_script(job).replace("import torch.distributed as dist\n", "")
    source = "\n".join(line for line in source.splitlines() if not line.startswith("from ray"))
    exec(compile(source, "job.py", "exec"), names)
    same_settings(names["RECIPE"], job, tmp_path)


def test_a_train_job_is_all_that_its_schema_knows() -> None:
    content = yaml.safe_load(train_job(job_of()))
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # a second's work

    read = TrainerV1alpha1TrainJob.from_dict(content)
    assert read is not None
    assert read.to_dict() == content  # fields that it does not know would be lost
    trainer = content["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert 'save = "/shared/runs/a-job"' in trainer["command"][2]


def test_a_sky_task_asks_for_the_gpus() -> None:
    content = yaml.safe_load(sky_task(job_of()))
    assert content["resources"] == {
        "accelerators": "H100:4",
        "image_id": "docker:registry/fivefold:1",
        "job_recovery": {"max_restarts_on_errors": 3},
    }
    assert (content["num_nodes"], content["volumes"]) == (2, {"/shared": "claim"})


def test_a_ray_worker_trains_as_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's parts are stand-ins that run one worker in this process."""

    class TorchTrainer:
        def __init__(self, run: Any, scaling_config: Any, **_: Any) -> None:
            assert scaling_config == {"num_workers": 1, "use_gpu": False}
            self.run = run

        def fit(self) -> None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                self.run({})
            finally:
                dist.destroy_process_group()

    settings = dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"), dict)
    torch_part = SimpleNamespace(TorchTrainer=TorchTrainer)
    parts = {"ray": SimpleNamespace(), "ray.train": SimpleNamespace(**settings)}
    for name, part in (parts | {"ray.train.torch": torch_part}).items():
        monkeypatch.setitem(sys.modules, name, part)
    where = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    where |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    script, save = tmp_path / "job.py", tmp_path / "run"
    argv = ["--ranks-per-node", "1", "--gpu", "none", "--train-iters", "4", "--save", str(save)]
    assert main(["launch", "ray", "debug", *argv, "--output", str(script)]) == 0
    runpy.run_path(str(script), run_name="__main__")
    assert len((save / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "status", "logged"),
    [
        ((), 7, ["requeue 42"]),
        (("cancelled",), 143, []),
        (("before srun",), 0, ["requeue 42"]),
        (("training",), 0, ["saved", "requeue 42"]),
        (("training",), 3, ["saved", "requeue 42"]),
        (("training", "saving"), 0, ["saved", "requeue 42"]),
        (("training", "saving"), 3, ["saved", "requeue 42"]),
    ],
)
def test_the_sbatch_job_waits_for_the_checkpoint_and_requeues(
    moments: tuple[str, ...], status: int, logged: list[str], tmp_path: Path
) -> None:
    """Whoever reaches a moment sends the signal to the script, whose number is in `job`."""
    signals = dict.fromkeys(moments, "kill -USR1 $(cat job); sleep 0.1")
    cancels = "kill -TERM $(cat job); sleep 0.1; " if "cancelled" in moments else ""
    ends = f"trap '' USR1; {cancels}exit {status}"
    if signals and not cancels:
        ends = "while :; do sleep 0.05; done"
    saves = f"saves() {{ {signals.get('saving', ':')}; echo saved >> log; exit {status}; }}"
    train = f"{saves}\ntrap saves USR1\n{signals.get('training', ':')}\n{ends}"
    stand_in(tmp_path, "srun", train)
    stand_in(tmp_path, "scontrol", 'echo "$@" >> log')
    stand_in(tmp_path, "mkdir", f'/bin/mkdir "$@"\n{signals.get("before srun", ":")}')
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    (tmp_path / "job.sbatch").write_text(sbatch_file(job_of()))
    starts = ["bash", "-c", "echo $$ > job; exec bash job.sbatch"]
    done = subprocess.run(starts, env=variables, cwd=tmp_path, capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (status, b"")
    log = tmp_path / "log"
    assert (log.read_text().splitlines() if log.exists() else []) == logged


def test_an_sbatch_job_is_requeued_so_often_and_tells_of_its_failures(tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", "exit 137")
    stand_in(tmp_path, "scontrol", 'echo "$@" >> log')
    (tmp_path / "job.sbatch").write_text(sbatch_file(job_of()))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    for start in range(5):
        words = ["bash", "job.sbatch"]
        done = subprocess.run(words, env=os.environ | variables, cwd=tmp_path, capture_output=True)
        assert (done.returncode, b"requeued" in done.stdout) == (137, start < 3)
    assert (tmp_path / "log").read_text() == "requeue 42\n" * 3
    failures = (tmp_path / "runs" / "a-job-42.failures").read_text().splitlines()
    assert len(failures) == 5 and all("status 137 on" in line for line in failures)


def test_what_a_job_lacks_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "kubernetes", "debug", "--time", "soon"]) == 2
    said = capsys.readouterr().err
    for text in ("'soon'", "needs --image", "needs --volume"):
        assert text in said
    assert main(["launch", "slurm", "demo", "--nodes", "0", "--max-restarts", "-1"]) == 2
    said = capsys.readouterr().err
    assert "--nodes must be at least 1, not 0" in said
    assert "--max-restarts must be 0 or more, not -1" in said
    assert main(["launch", "slurm", "demo", "--ranks-per-node", "3"]) == 2
    assert "3 ranks cannot be split as tp=2 pp=2" in capsys.readouterr().err
    assert main(["launch", "slrum", "demo"]) == 2
    assert "TARGET cannot be 'slrum', did you mean 'slurm'?" in capsys.readouterr().err


_PLACE = ["--image", "a/b:1", "--volume", "v:/shared"]
_NEEDED = {"kubernetes": _PLACE, "skypilot": _PLACE}


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "skypilot", "ray"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("gpu", "B200"),
        ("time", "7:08:09"),
        ("max-restarts", "9"),
        ("image", "other/image:2"),
        ("volume", "w:/else"),
    ],
)
def test_an_option_is_in_the_job_file_or_refused(
    target: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", target, "debug", "--save", "/shared/run", *_NEEDED.get(target, [])]
    assert main(words) == 0
    before = capsys.readouterr().out
    status = main([*words, f"--{flag}", value])
    after, said = capsys.readouterr()
    if status == 0:
        assert after != before
    else:
        assert f"--{flag} has no effect on a job for {target}" in said
        default = said.partition("works: ")[2].split()
        assert main([*words, f"--{flag}", value, *default]) == 0


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "skypilot", "ray"])
def test_the_command_that_submits_a_job_can_be_typed(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a job's file"
    words = ["--save", "/shared/run", *_NEEDED.get(target, [])]
    assert main(["launch", target, "debug", *words, "--output", str(path)]) == 0
    told, _, command = capsys.readouterr().out.partition("; submit it: ")
    assert told == f"{path} is written" and shlex.split(command)[-1] == str(path)


def test_a_job_is_submitted_by_the_clusters_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "slurm", "demo", "--ranks-per-node", "4", "--submit"]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(words) == 2
    assert "sbatch demo.sbatch" in capfd.readouterr().err
    stand_in(tmp_path, "sbatch", "echo Submitted batch job 42: $1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(words) == 0
    assert "Submitted batch job 42: demo.sbatch" in capfd.readouterr().out


@given(st.text())
def test_any_text_is_a_limit_or_refused_and_a_name_for_any_scheduler(text: str) -> None:
    name = job_name(text)
    assert name[0].isalpha() and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not name.endswith("-") and len(name) < 63
    with suppress(ConfigError):
        assert read_limit(text) > timedelta(minutes=10)
