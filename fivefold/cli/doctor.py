"""`fivefold doctor`: examine this machine, and advise what to install or fix."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fivefold import __version__
from fivefold.cli.style import Style, paint
from fivefold.config.sources import load_options
from fivefold.errors import FivefoldError
from fivefold.files import at_home
from fivefold.tell.columns import line_width
from fivefold.units import human_bytes, human_flops, human_seconds, several, wrapped

if TYPE_CHECKING:
    import torch

    from fivefold.train.ranks.rank_env import RankEnv

Verdict = Literal["ok", "note", "bad"]

PYTHON, TORCH = (3, 11), (2, 11)
FREE_DISK = 10 << 30  # bytes; with less, a few checkpoints of a small model may not fit
ENOUGH_SECONDS = 0.3  # of multiplications of one precision
KNOWN, KNOWN_TOKENS = "llama3-8b", 8192
"""The model with whose layer the cost of launches is compared."""
MARKS: dict[Verdict, tuple[str, Style]] = {
    "ok": ("ok  ", "green"),
    "note": ("note", "yellow"),
    "bad": ("bad ", "red"),
}
_INDENT = " " * 22


@dataclass(frozen=True)
class Options:
    """Show what this machine can do: software, processors, memory, communication, speed.

    The exit status is 1 if something is missing that training needs.
    """


@dataclass(frozen=True)
class HealthLine:
    """One line of the report.

    Attributes:
        verdict: whether it is in order, worth a note, or a problem.
        name: name of the thing examined.
        text: what was found.
    """

    verdict: Verdict
    name: str
    text: str


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    load_options(argv, Options)
    verdicts = []
    print(paint(f"fivefold {__version__} on {platform.node()}", "bold", sys.stdout))
    for section, examine in SECTIONS.items():
        print(f"\n{paint(section, 'bold', sys.stdout)}")
        for finding in _whole(examine):
            mark, style = MARKS[finding.verdict]
            first, *more = wrapped(finding.text, line_width() - len(_INDENT))
            print(f"  {paint(mark, style, sys.stdout)}  {finding.name:<14}{first}")
            print("".join(f"{_INDENT}{line}\n" for line in more), end="", flush=True)
            verdicts.append(finding.verdict)
    bad = verdicts.count("bad")
    print(f"\n{several(bad, 'thing')} to mend before training" if bad else "\nready to train")
    return 1 if bad else 0


def _whole(examine: Callable[[], Iterator[HealthLine]]) -> Iterator[HealthLine]:
    """The lines of a section; a missing package ends the section with a line that names it."""
    try:
        yield from examine()
    except ImportError as error:
        yield HealthLine("bad", "the rest", f"cannot be examined without {error.name}")


def _software() -> Iterator[HealthLine]:
    version = platform.python_version()
    verdict: Verdict = "ok" if sys.version_info >= PYTHON else "bad"
    needs = "" if verdict == "ok" else f", needs {_dotted(PYTHON)}"
    yield HealthLine(
        verdict, "Python", f"{version} on {platform.system()} {platform.machine()}{needs}"
    )
    yield _torch()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fivefold", "--version"], capture_output=True, check=True)
    start = human_seconds(time.perf_counter() - began)
    yield HealthLine("ok", "start-up", f"{start} to answer a mistake")
    for name, use in (
        ("numpy", "batches"),
        ("tokenizers", "tokenising text"),
        ("rich", "the console"),
        ("psutil", "memory figures"),
    ):
        yield _package(name, use, "bad")
    for name, use in (
        ("pyarrow", "Parquet corpora"),
        ("tensorboard", "--tensorboard"),
        ("wandb", "--wandb-project"),
    ):
        yield _package(name, use, "note")


def _torch() -> HealthLine:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return HealthLine("bad", "torch", f"not installed: pip install 'torch>={_dotted(TORCH)}'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < TORCH:
        return HealthLine("bad", "torch", f"{version}, needs {_dotted(TORCH)} or later")
    began = time.perf_counter()
    import torch

    seconds = human_seconds(time.perf_counter() - began)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return HealthLine("ok", "torch", f"{version}, {cuda}, imported in {seconds}")


def _package(name: str, use: str, otherwise: Verdict) -> HealthLine:
    if importlib.util.find_spec(name) is None:
        return HealthLine(otherwise, name, f"not installed: pip install {name} for {use}")
    return HealthLine("ok", name, f"{importlib.metadata.version(name)}, for {use}")


def _machine() -> Iterator[HealthLine]:
    import psutil

    from fivefold.data.prepare import DEFAULT_CACHE

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield HealthLine("ok", "cores", f"{cores} of {os.cpu_count()} usable by this process")
    memory = psutil.virtual_memory()
    free = f"{human_bytes(memory.available)} of {human_bytes(memory.total)} free"
    yield HealthLine("ok", "memory", free)
    yield disk("disk here", Path.cwd(), "--save")
    try:
        yield disk("disk of cache", at_home(DEFAULT_CACHE), "--data-cache-path")
    except FivefoldError as error:
        yield HealthLine("bad", "disk of cache", f"{error}: runs need --data-cache-path")
    yield from _gpus()


def disk(name: str, folder: Path, flag: str) -> HealthLine:
    """Whether runs can write to a folder (the flag names another one), and its free space.

    A folder that does not exist yet is checked by its nearest existing parent.
    """
    folder = next(place for place in (folder, *folder.parents) if place.exists())
    space = shutil.disk_usage(folder).free
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return HealthLine("note", name, f"{folder} cannot be written: {flag} names another folder")
    verdict: Verdict = "ok" if space >= FREE_DISK else "note"
    return HealthLine(verdict, name, f"{human_bytes(space)} free in {folder}")


def _gpus() -> Iterator[HealthLine]:
    import torch

    from fivefold.hardware import peak_flops

    if not torch.cuda.is_available():
        yield HealthLine("note", "GPU", "none visible: training runs on the CPU, over gloo")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        peak = peak_flops(gpu.name, "bf16")
        speed = f"peak {human_flops(peak)}/s in bf16" if peak else "peak unknown, so no MFU"
        yield HealthLine(
            "ok", f"GPU {index}", f"{gpu.name}, {human_bytes(gpu.total_memory)}, {speed}"
        )


def _communication() -> Iterator[HealthLine]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield HealthLine("bad", "gloo", "this torch is built without it")
        return
    yield _round_trip()
    if dist.is_nccl_available():
        yield HealthLine("ok", "nccl", "available")
    else:
        yield HealthLine("note", "nccl", "not in this torch: GPUs cannot train together")


def _round_trip() -> HealthLine:
    """Test two processes, started as training starts them, with a sum and a message."""
    from fivefold.train.ranks.launch import launch_local

    began = time.perf_counter()
    status = launch_local(_pass_a_message, 2)
    seconds = human_seconds(time.perf_counter() - began)
    if status:
        return HealthLine("bad", "gloo", f"two processes could not talk (status {status})")
    return HealthLine(
        "ok", "gloo", f"two processes started, summed, exchanged and left in {seconds}"
    )


def _pass_a_message(env: "RankEnv") -> int:
    import torch
    import torch.distributed as dist

    from fivefold.train.ranks.join import init_process_group

    init_process_group(env, "cpu", timeout_seconds=60)
    total = torch.ones(1 << 16)
    dist.all_reduce(total)
    message = torch.full((4,), float(env.rank))
    if env.rank == 0:
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    return 0 if total[-1] == 2 and message[0] == 0 else 1


def _speed() -> Iterator[HealthLine]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if device == "cuda" else 384
    speeds = {t: _matmul_speed(getattr(torch, t), size, device) for t in ("float32", "bfloat16")}
    fp32, bf16 = speeds["float32"], speeds["bfloat16"]
    yield HealthLine("ok", "fp32 matmul", f"{human_flops(fp32)}/s, {size} x {size} on {device}")
    slower = bf16 < fp32
    advice = ": --fp32 is faster here" if slower else ""
    yield HealthLine(
        "note" if slower else "ok",
        "bf16 matmul",
        f"{human_flops(bf16)}/s, {bf16 / fp32:.1f} x fp32{advice}",
    )
    yield _launches(device, max(fp32, bf16))
    yield _fused_adamw(device)
    yield _attention(device)


def _matmul_speed(dtype: "torch.dtype", size: int, device: str) -> float:
    """FLOP/s of the fastest of a few square multiplications, of two where they are slow, as in bf16
    on processors that cannot multiply it."""
    import torch

    a = torch.randn(size, size, device=device).to(dtype)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else _nothing
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < 6 and sum(seconds) < ENOUGH_SECONDS):
        began = time.perf_counter()
        a @ a
        wait()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def _nothing() -> None:
    """Do nothing: a CPU has finished when the call returns."""


def _launches(device: str, speed: float) -> HealthLine:
    """The time of the host to launch an operation, and so at least for a layer; its share of the
    time of a known layer's products, at `speed` FLOP/s."""
    import torch

    from fivefold.config.presets import PRESETS
    from fivefold.description.shape import training_flops
    from fivefold.pipeline.split.stages import StageSpec
    from fivefold.predict.times.layer import DENSE_OPERATIONS

    x, calls = torch.zeros(8, device=device), 1000
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(calls):
            x.add_(1.0)
        seconds.append((time.perf_counter() - began) / calls)
    layer = 3 * DENSE_OPERATIONS
    least = layer * min(seconds)
    one = StageSpec(embedding=False, layers=(0,), head=False)
    products = KNOWN_TOKENS * training_flops(PRESETS[KNOWN], KNOWN_TOKENS, one).matmul / speed
    share = least / products
    return HealthLine(
        "note" if share > 1 else "ok",
        "launches",
        f"{human_seconds(min(seconds))} of the host each; a dense layer has some {layer} for a "
        f"microbatch, at least {human_seconds(least)}, while its products take "
        f"{human_seconds(products)} ({KNOWN}, {KNOWN_TOKENS:,} tokens, one rank): "
        f"{'less than 0.1%' if share < 1e-3 else f'{share:.1%}'}",
    )


def _fused_adamw(device: str) -> HealthLine:
    import torch

    weight = torch.zeros(64, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    try:
        torch.optim.AdamW([weight], fused=True).step()
    except RuntimeError as error:
        return HealthLine("note", "fused AdamW", f"not on {device}: {error}")
    return HealthLine("ok", "fused AdamW", f"works on {device}")


def _attention(device: str) -> HealthLine:
    """The kernel that computes attention in bf16, and why faster ones cannot be used."""
    import torch

    from fivefold.model.attention.kernels import KERNELS

    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    lacks = {name: lacking(q, q) for name, (_, lacking) in KERNELS.items()}
    chosen = next(name for name, missing in lacks.items() if not missing)
    alike: dict[str, list[str]] = {}
    for name, missing in lacks.items():
        alike.setdefault(missing, []).append(name)
    others = [f"{', '.join(names)}: {missing}" for missing, names in alike.items() if missing]
    verdict: Verdict = "note" if chosen == "plain" else "ok"
    return HealthLine(verdict, "attention", "; ".join([f"{chosen} in blocks", *others]))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# Communication forks, so it comes before everything that creates a CUDA context or threads.
SECTIONS: dict[str, Callable[[], Iterator[HealthLine]]] = {
    "software": _software,
    "communication": _communication,
    "machine": _machine,
    "speed": _speed,
}
