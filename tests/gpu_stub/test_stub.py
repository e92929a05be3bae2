"""The CUDA paths where there is no GPU, over libraries that only pretend to be CUDA and NCCL.

`FIVEFOLD_CUDA_STUB` is a command that runs the command behind it with the CUDA build of torch over
such libraries. They copy but compute nothing, so numbers mean nothing here; what runs is torch's
own code and ours for GPUs: streams, events, allocators, `ProcessGroupNCCL`, autograd's threads.
They read `FAKECUDA_DEVICES`, the number of GPUs, and write what is called to `$FAKECUDA_LOG.PID`.
"""

import json
import os
import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

STUB = shlex.split(os.environ.get("FIVEFOLD_CUDA_STUB", ""))
needs_stub = pytest.mark.skipif(not STUB, reason="FIVEFOLD_CUDA_STUB names no command")
ROOT = Path(__file__).parents[2]
ALONE = ("--tp", "1", "--no-sequence-parallel")
ON_HOST = "--optimizer-cpu-offload"
TWO = ("debug", "--nproc", "2", *ALONE)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor": ("debug", "--nproc", "2", "--tp", "2"),
    "tensor, pipeline": ("debug", "--nproc", "4", "--tp", "2", "--pp", "2"),
    "sharded": (*TWO, "--data-parallel-sharding-strategy", "optim_grads_params"),
    "sharded pipeline": (
        *("debug", "--nproc", "4", *ALONE, "--pp", "2", "--precision", "bf16"),
        *("--data-parallel-sharding-strategy", "optim_grads"),
    ),
    "split norms, optimizer on the host": (
        *("debug", "--nproc", "4", "--tp", "2", "--sequence-parallel", ON_HOST),
        *("--data-parallel-sharding-strategy", "optim_grads"),
    ),
    "replicated": TWO,
    "zb_v": (*TWO, "--pp", "2", "--pipeline-schedule", "zb_v"),
    "dualpipe_v": (*TWO, "--pp", "2", "--pipeline-schedule", "dualpipe_v"),
    "ring": (*TWO, "--cp", "2"),
    "ring, probabilities dropped": (*TWO, "--cp", "2", "--attention-dropout", "0.1"),
    "gathered keys": (*TWO, "--cp", "2", "--cp-comm-type", "all_gather"),
    "ulysses": (*TWO, "--cp", "2", "--cp-comm-type", "a2a"),
    "ulysses in a ring": (
        *("debug", "--nproc", "4", *ALONE, "--cp", "4", "--cp-comm-type", "a2a+p2p"),
        *("--hierarchical-context-parallel-sizes", "2", "2"),
    ),
    "hybrid": (
        *("debug", "--nproc", "4", *ALONE, "--num-distributed-optimizer-instances", "2"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ),
    "offloaded": (
        *("debug", "--nproc", "1", *ALONE),
        *("--fine-grained-activation-offloading", "--offload-modules", "core_attn"),
    ),
    "weights off the device": (
        *(*TWO, "--data-parallel-sharding-strategy", "optim_grads_params"),
        *(ON_HOST, "--param-cpu-offload"),
    ),
}
GRAPH = ("--cuda-graph-impl", "local", "--no-reset-attention-mask")
GRAPHED = ("tensor", "sharded", "replicated", "ring", "gathered keys", "ulysses", "hybrid")
CALL = re.compile(r"(\w+) comm (\S+) (type .*?)(?: peer (\d+))? stream \d+$")
MADE = re.compile(r"(?:init|.* to) comm (\S+) rank (\d+) of \d+")
USES = re.compile(r"thread (\d+) uses device (\d+)")


def on_stub(*words: str, gpus: int, folder: Path, seconds: float = 300, status: int = 0) -> str:
    """What a module of Python prints there; fails with its last words if it ends otherwise."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PROJECT": str(ROOT),
        "FAKECUDA_DEVICES": str(gpus),
        "FAKECUDA_LOG": str(folder / "calls"),
    }
    command = [*STUB, "python", "-m", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=seconds
    )
    assert done.returncode == status, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def steps(folder: Path, *words: str, gpus: int) -> list[dict[str, Any]]:
    """What `steps.py` found, by rank."""
    said = on_stub("tests.gpu_stub.steps", *words, "--bf16", gpus=gpus, folder=folder)
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("gpus", [8, 1], ids=["a GPU a rank", "one GPU"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_races_one_wait_a_step_and_the_same_calls(name: str, gpus: int, tmp_path: Path) -> None:
    ranks = steps(tmp_path, *LAYOUTS[name], gpus=gpus)
    assert len(ranks) == int(LAYOUTS[name][2])
    for rank in ranks:
        assert not rank["races"], "\n".join(rank["races"])
        if gpus > 1:  # threads that send through the host wait for their copies
            updates = ON_HOST in LAYOUTS[name]  # when the last gradient has arrived there
            assert max(rank["waits"]) <= 1 + updates, rank["waits"]
    assert not disagreements(tmp_path)


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("gpus", [8, 1], ids=["a GPU a rank", "one GPU"])
def test_planted_missing_waits_are_found(gpus: int, tmp_path: Path) -> None:
    ranks = steps(tmp_path, "--forget-waits", *LAYOUTS["tensor"], gpus=gpus)
    for rank in ranks:
        assert any("writes in c10d::" in race for race in rank["races"])


@needs_stub
@pytest.mark.slow
def test_a_verification_that_follows_streams_ends(tmp_path: Path) -> None:
    """torch frees events of CUDA without a word to weak references, which then crash a rank."""
    flags = ("--steps", "1", "--device", "cuda", "--races")
    said = on_stub(
        "fivefold", "verify", *LAYOUTS["zb_v"], *flags, gpus=1, folder=tmp_path, status=1
    )
    assert "worst      loss in step 1" in said and "FAILED" in said  # nothing is computed there


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one rank", *GRAPHED])
def test_steps_are_recorded_as_graphs(name: str, tmp_path: Path) -> None:
    """A stub with the rules of captures refuses waits of the host, for events from outside, and
    streams that are not joined."""
    words = LAYOUTS.get(name, ("debug", "--nproc", "1", *ALONE))
    try:
        ranks = steps(tmp_path, *words, *GRAPH, gpus=8)
    except AssertionError as failure:
        if "cudaErrorNotSupported" in str(failure):
            pytest.skip("this stub knows no captures")
        raise
    for rank in ranks:
        assert rank["replayed"] == 4  # of six, after two
        assert not rank["races"] and max(rank["waits"]) <= 1
    assert not disagreements(tmp_path)


@needs_stub
@pytest.mark.slow
def test_trains_and_saves(tmp_path: Path) -> None:
    flags = ("--train-iters", "2", "--lr-warmup-iters", "0", "--bf16", "--save", "run")
    words = ("fivefold", "train", *LAYOUTS["tensor, pipeline"], "--device", "cuda", *flags)
    on_stub(*words, "--no-check-for-nan-in-loss-and-grad", gpus=8, folder=tmp_path)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not disagreements(tmp_path)


def disagreements(folder: Path) -> list[str]:
    """What differs between ranks in the calls of each communicator, and threads on two devices.

    A log has lines such as `init comm NAME rank 0 of 2 device 0`, `group {`,
    `send comm NAME type bfloat16 count 4096 peer 1 stream 5` and `thread 7 uses device 0 (set)`.
    """
    found: list[str] = []
    collectives: dict[str, dict[int, list[str]]] = defaultdict(dict)
    messages: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(dict)
    for file in folder.glob("calls.*"):
        own: dict[str, str] = {}
        devices: dict[str, str] = {}
        for line in file.read_text().splitlines():
            if line.startswith("FAULT"):
                found.append(f"{file.name}: {line}")
            elif made := MADE.match(line):
                own[made[1]] = made[2]
                collectives[made[1]].setdefault(int(made[2]), [])
            elif uses := USES.match(line):
                if devices.setdefault("process", uses[2]) != uses[2]:
                    found.append(f"{file.name}: {line}, not {devices['process']}")
            elif call := CALL.match(line):
                name, comm, what, peer = call.groups()
                if peer is None:
                    collectives[comm][int(own[comm])].append(f"{name} {what}")
                else:
                    ends = (own[comm], peer) if name == "send" else (peer, own[comm])
                    messages[comm, *ends].setdefault(name, []).append(what)
    for comm, calls in collectives.items():
        first = calls[min(calls)]
        found += [f"{comm}: ranks {min(calls)} and {r} differ" for r in calls if calls[r] != first]
    for where, ends in messages.items():
        if ends.get("send") != ends.get("recv"):
            found.append(f"{where}: what is sent is not what is received")
    return found


def test_a_log_that_disagrees_is_told(tmp_path: Path) -> None:
    made = "init comm a rank {} of 2 device {}\nthread 7 uses device {} (set)\n"
    same = "allreduce comm a type float count 4 op sum stream 5\n"
    for rank in (0, 1):
        text = made.format(rank, rank, rank) + same
        (tmp_path / f"calls.{rank}").write_text(text)
    assert not disagreements(tmp_path)
    (tmp_path / "calls.1").write_text(made.format(1, 1, 1) + same.replace("4", "5"))
    assert disagreements(tmp_path) == ["a: ranks 0 and 1 differ"]
    (tmp_path / "calls.1").write_text(
        made.format(1, 1, 0) + same + "thread 8 uses device 1 (set)\n"
    )
    (wrong,) = disagreements(tmp_path)
    assert "device 1" in wrong
    (tmp_path / "calls.1").write_text(
        made.format(1, 1, 1) + same + "send comm a type float count 4 peer 0 stream 5\n"
    )
    assert disagreements(tmp_path) == ["('a', '1', '0'): what is sent is not what is received"]
