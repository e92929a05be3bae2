"""Runs a command where CUDA and NCCL only pretend, and reads what was called there.

`FIVEFOLD_CUDA_STUB` is a command that runs the command behind it with the CUDA build of torch over
such libraries. They copy but compute nothing, so numbers mean nothing here; what runs is torch's
own code and ours for GPUs: streams, events, allocators, `ProcessGroupNCCL`, autograd's threads.
They read `FAKECUDA_DEVICES`, the number of GPUs, and `FAKECUDA_CAPABILITY`, and write what is
called to `$FAKECUDA_LOG.PID`.
"""

import json
import os
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.config import Config

STUB = shlex.split(os.environ.get("FIVEFOLD_CUDA_STUB", ""))
needs_stub = pytest.mark.skipif(not STUB, reason="FIVEFOLD_CUDA_STUB names no command")
ROOT = Path(__file__).parents[2]
CALL = re.compile(r"(\w+) comm (\S+) (type .*?)(?: peer (\d+))? stream \d+$")
MADE = re.compile(r"(?:init|.* to) comm (\S+) rank (\d+) of \d+")
USES = re.compile(r"thread (\d+) uses device (\d+)")
STEP = "at train/step_result.py"
OF_HOST = ("at memory/host.py",)
OF_EXPERTS = ("at expert/dispatch.py", "at model/moe/layer.py", "at model/moe/grouped.py")
OF_SINKHORN = "at model/moe/balance.py"


def on_stub(
    *words: str,
    gpus: int,
    folder: Path,
    seconds: float = 300,
    status: int = 0,
    capability: tuple[int, int] = (9, 0),
) -> str:
    """What a module of Python prints there; fails with its last words if it ends otherwise."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PROJECT": str(ROOT),
        "FAKECUDA_CAPABILITY": "{}.{}".format(*capability),
        "FAKECUDA_DEVICES": str(gpus),
        "FAKECUDA_LOG": str(folder / "calls"),
    }
    command = [*STUB, "python", "-m", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=seconds
    )
    if "requires cublasLt" in done.stderr:
        pytest.skip("this stub names no release of cuBLAS, and has no scales of 128 elements")
    assert done.returncode == status, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return done.stdout


def steps(folder: Path, *words: str, **options: Any) -> list[dict[str, Any]]:
    """What `steps.py` found, by rank and layout; options as `on_stub` takes them."""
    return _reports(on_stub("tests.gpu_stub.steps", *words, folder=folder, **options))


def texts(folder: Path, *words: str, **options: Any) -> list[dict[str, Any]]:
    """What `texts.py` found, by rank; options as `on_stub` takes them."""
    return _reports(on_stub("tests.gpu_stub.texts", *words, folder=folder, **options))


def _reports(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]


def faults(report: Mapping[str, Any], config: Config, *, own_gpu: bool) -> Iterator[str]:
    """What `steps.py` found wrong on a rank with this configuration.

    Ranks that share a GPU send through the host, in threads that wait for their copies.
    """
    yield from report["races"]
    if own_gpu:
        memory = config.memory
        on_host = memory.optimizer_cpu_offload or memory.offload_optimizer_states
        known = OF_HOST if on_host else ()
        if config.model.num_experts is not None:
            known += OF_EXPERTS
        if "sinkhorn" in config.experts.moe_router_load_balancing_type:
            known += (OF_SINKHORN,)
        yield from needless(report, *known)


def needless(found: Mapping[str, Any], *known: str) -> Iterator[str]:
    """Where a rank waits for its GPU, but for once a step and in files that are known to, and
    where it copies memory that is not pinned as if it were."""
    for waits, pageable in zip(found["waits"], found["pageable"], strict=True):
        for place, times in waits.items():
            if not place.startswith(known) and times > place.startswith(STEP):
                yield f"waits {times} times {place}"
        if sum(waits[place] for place in waits if place.startswith(STEP)) > 1:
            yield f"waits more than once: {waits}"
        yield from (
            f"copies what is not pinned {place}" for place in pageable if place not in waits
        )


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
