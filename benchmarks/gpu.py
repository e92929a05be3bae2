"""Proves and measures on one GPU, in some twenty minutes; in a dry form, on a CPU.

    make gpu                        # or python -m benchmarks.gpu [--parts twins layers]
    python -m benchmarks.gpu --dry  # the same parts, small, where there is no GPU

Each part runs in processes of its own, so that one that fails or hangs takes no other with it:

    twins      kernels of CUDA against their plain twins (`pytest -m gpu`)
    verify     `fivefold verify` on one rank, for one technique after the other: in fp64 and bf16,
               and some in fp16
    ranks      `fivefold verify` on 2 to 8 ranks that share the GPU, in fp64, for every kind of
               parallelism: with streams followed for races, and with random delays in them
    layers     time, MFU, launches, idle share and memory of layers, beside plain PyTorch
    losses     time and memory of output layer and loss
    eight_bit  time of 8-bit operands and products
    messages   time to round ZeRO++'s messages
    updates    time of AdamW, with states of few bits, and of Muon
    host       the host's time of a layer and microbatch
    train      `fivefold train` for a few steps, with and without offloaded activations
    runs       training of models of real size, held against what theory and the planner say
    calibrate  `fivefold plan --calibrate`, to be held against the presets

Results are kept in benchmarks/results/gpu-DATE.json, with the hardware.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
MARK, KERNELS = "pytest.mark.gpu", "from tests.kernels import DEVICES"
"""What marks a test that needs a GPU: by itself, or by where it runs kernels."""
SLOW = 400
"""Seconds after which a benchmark is stopped."""
KEPT, SHOWN = 100, 8
"""Last lines of a process that failed: in the results, where a crash leaves many, and on screen."""
LINEAR_LOSS = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear")
ONE_RANK = ("--tp", "1", "--no-sequence-parallel")
FP8 = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
GRAPH = ("--cuda-graph-impl", "local", "--no-reset-attention-mask")
OFFLOADS = ("--fine-grained-activation-offloading", "--offload-modules", "core_attn")
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "plain": ("debug",),
    "whole rows": ("debug", "--no-reset-attention-mask"),
    "window": ("debug", "--window-size", "5"),
    "dropout": ("debug", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    "recomputed": ("debug", "--recompute-granularity", "full"),
    "offloaded": ("debug", *OFFLOADS),
    "native loss": ("debug", "--cross-entropy-loss-fusion"),
    "linear loss": ("debug", *LINEAR_LOSS),
    "compiled": ("debug", "--compile"),
    "residual sum and norm in one": ("debug", "--fused-residual-rmsnorm"),
    "norms around, factors": (
        *("debug", "--norm-placement", "both", "--apply-layernorm-1p", "--qk-layernorm"),
        *("--embedding-multiplier", "5.6", "--residual-multiplier", "0.5"),
        *("--softmax-scale", "0.3", "--logits-scaling", "3", "--fused-residual-rmsnorm"),
    ),
    "capped scores and logits": (
        *("debug", "--attn-logit-softcapping", "0.5", "--final-logit-softcapping", "2"),
        *("--window-size", "5", "--window-attn-skip-freq", "2"),
        *("--rotary-seq-len-interpolation-factor", "2.5"),
    ),
    "capped scores of documents, dropped": (
        *("debug", "--attn-logit-softcapping", "0.5", "--attention-dropout", "0.1"),
        *("--reset-attention-mask", "--reset-position-ids", "--cross-entropy-loss-fusion"),
        *("--final-logit-softcapping", "2"),
    ),
    "windows with a base of their own": (
        *("debug", "--window-size", "5", "--window-attn-skip-freq", "2"),
        *("--rotary-base-local", "100"),
    ),
    "tiles": (
        *("debug", "--recompute-granularity", "selective", "--recompute-modules", "mlp"),
        *("--tiled-mlp-num-shards", "3"),
    ),
    "adapters": ("debug", "--lora-rank", "4", "--lora-dropout", "0.1", "--use-dora"),
    "optimizer on the host": ("debug", "--optimizer-cpu-offload"),
    "optimizer states brought": ("debug", "--offload-optimizer-states"),
    "states of few bits": (
        *("debug", "--use-precision-aware-optimizer"),
        *("--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"),
    ),
    "deferred weights": ("debug", "--pipeline-schedule", "zb_h1"),
    "experts": ("debug-mixtral",),
    "latents": ("debug-deepseek-v3",),
    "sinks": ("debug-gpt-oss",),
    "fp8": ("debug", *FP8),
    "fp8 experts": ("debug-mixtral", *FP8),
    "fp8, scales of earlier steps": ("debug-mixtral", *FP8[:2], "--fp8-recipe", "delayed"),
    "step as one graph": ("debug", *GRAPH),
    "step as one graph, compiled": ("debug", *GRAPH, "--compile"),
    "step as one graph, recomputed, linear loss": (
        *("debug", *GRAPH, *LINEAR_LOSS, "--recompute-granularity", "full"),
    ),
    "step as one graph, fp8, scales of earlier steps": (
        *("debug", *GRAPH, *FP8[:2], "--fp8-recipe", "delayed"),
    ),
}
IN_FP16 = ("dropout", "compiled", "experts", "optimizer on the host", "step as one graph")
SHARDED = ("--data-parallel-sharding-strategy", "optim_grads_params")
RANKS: dict[str, tuple[str, ...]] = {
    "2: dp, gradients sharded": (
        *("debug", "--nproc", "2", *ONE_RANK),
        *("--data-parallel-sharding-strategy", "optim_grads"),
    ),
    "2: tp in parts": (
        *("debug", "--nproc", "2", "--tp", "2", "--sequence-parallel", "--tp-comm-overlap"),
    ),
    "2: tp, heads normalised together": (
        *("debug", "--nproc", "2", "--tp", "2", "--norm-placement", "after"),
        *("--qk-layernorm", "--qk-layernorm-type", "all_heads"),
    ),
    "2: tp, fp8 in bf16": (
        *("debug", "--nproc", "2", "--tp", "2", "--sequence-parallel", "--precision", "bf16"),
        *("--fp8-format", "e4m3", "--fp8-recipe", "rowwise"),
    ),
    "2: ZeRO++": (
        *("debug", "--nproc", "2", *ONE_RANK, *SHARDED),
        *("--zero-quantized-weights", "--zero-quantized-gradients"),
    ),
    "2: weights on the host": (
        *("debug", "--nproc", "2", *ONE_RANK, *SHARDED),
        *("--param-cpu-offload", "--optimizer-cpu-offload"),
    ),
    "2: zb_v": ("debug", "--nproc", "2", *ONE_RANK, "--pp", "2", "--pipeline-schedule", "zb_v"),
    "2: dualpipe_v": (
        *("debug", "--nproc", "2", *ONE_RANK),
        *("--pp", "2", "--pipeline-schedule", "dualpipe_v"),
    ),
    "2: ring": ("debug", "--nproc", "2", *ONE_RANK, "--cp", "2"),
    "2: gathered keys": (
        *("debug", "--nproc", "2", *ONE_RANK, "--cp", "2", "--cp-comm-type", "all_gather"),
        *("--recompute-granularity", "full"),
    ),
    "2: Ulysses": ("debug", "--nproc", "2", *ONE_RANK, "--cp", "2", "--cp-comm-type", "a2a"),
    "4: Ulysses in a ring": (
        *("debug", "--nproc", "4", *ONE_RANK, "--cp", "4", "--cp-comm-type", "a2a+p2p"),
        *("--hierarchical-context-parallel-sizes", "2", "2"),
    ),
    "4: tp, pp": ("debug", "--nproc", "4", "--tp", "2", "--pp", "2"),
    "4: tp, parameters sharded, offloaded": (
        *("debug", "--nproc", "4", "--tp", "2", *SHARDED, *OFFLOADS),
    ),
    "4: HSDP": (
        *("debug", "--nproc", "4", *ONE_RANK, *SHARDED),
        *("--num-distributed-optimizer-instances", "2"),
    ),
    "4: ep, experts in tensor parallel": (
        *("debug-mixtral", "--nproc", "4", "--tp", "2", "--sequence-parallel", "--ep", "2"),
        *("--expert-tensor-parallel-size", "2"),
    ),
    "4: ep, flex, sharded": (
        *("debug-mixtral", "--nproc", "4", *ONE_RANK, "--ep", "2", *SHARDED),
        *("--moe-token-dispatcher-type", "flex"),
    ),
    "4: latents, ep, pp": (
        *("debug-deepseek-v3", "--nproc", "4", *ONE_RANK, "--ep", "2", "--pp", "2"),
    ),
    "4: ep beside another microbatch": (
        *("debug-mixtral", "--nproc", "4", *ONE_RANK, "--ep", "2", "--pp", "2"),
        *("--pipeline-schedule", "dualpipe_v", "--overlap-moe-expert-parallel-comm"),
    ),
    "8: tp, pp, cp": ("debug", "--nproc", "8", "--tp", "2", "--pp", "2", "--cp", "2"),
    "8: tp, pp, ep, sharded": (
        *("debug-mixtral", "--nproc", "8", "--tp", "2", "--sequence-parallel", *SHARDED),
        *("--pp", "2", "--ep", "2"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
        passed: whether its exit status was 0.
        seconds: how long it took.
        last: the last lines of what it said, if it failed.
        rows: lines of JSON that it printed.
    """

    passed: bool
    seconds: float
    last: str
    rows: tuple[Any, ...] = ()


def run(
    *words: str, limit: float, folder: Path = ROOT, more: Mapping[str, str] | None = None
) -> Outcome:
    """Run a module of Python, from this checkout, with `more` in its environment."""
    began = time.perf_counter()
    path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "PYTHONPATH": path, **(more or {})}
    command = [sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=limit, env=environment
        )
        output, said, passed = done.stdout, done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        said = output + (late.stderr or b"").decode(errors="replace")
        said, passed = said + f"\nnot done after {limit:.0f} s", False
    last = "" if passed else "\n".join(said.splitlines()[-KEPT:])
    return Outcome(passed, time.perf_counter() - began, last, _rows(output))


def _rows(output: str) -> tuple[Any, ...]:
    """The lines of JSON in what a process printed."""
    return tuple(json.loads(line) for line in output.splitlines() if line.startswith('{"'))


def side_by_side(
    named: Mapping[str, tuple[str, ...]], *, limit: float, share: int
) -> Iterator[tuple[str, Outcome]]:
    """Run modules of Python in turn, several at once: one for every `share` cores."""
    one = partial(run, limit=limit, more={"OMP_NUM_THREADS": "1"})  # or threads outnumber the cores
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // share)) as pool:
        yield from zip(named, pool.map(lambda words: one(*words), named.values()), strict=True)


def twins(dry: bool) -> Iterator[tuple[str, Outcome]]:
    """Kernels against their plain twins; on a CPU they are collected and skipped."""
    words = ("pytest", "-q", "-p", "no:xdist", "-m", "gpu")
    yield from side_by_side({file: (*words, file) for file in of_gpu()}, limit=240, share=4)


def of_gpu() -> list[str]:
    """Files with tests that need a GPU; to collect all files takes longer than to run these."""
    tests = ROOT / "tests"
    texts = {file: file.read_text() for file in sorted(tests.rglob("test_*.py"))}
    marked = [file for file, text in texts.items() if MARK in text or KERNELS in text]
    return [str(file.relative_to(ROOT)) for file in marked]


def verify(dry: bool) -> Iterator[tuple[str, Outcome]]:
    """One rank against one device, technique by technique, several side by side."""
    named: dict[str, tuple[str, ...]] = {}
    for name, (recipe, *flags) in TECHNIQUES.items():
        if dry and "--compile" in flags:
            flags += ["--compile-backend", "aot_eager"]
        steps = "4" if GRAPH[0] in flags else "2"  # two are launched, then two replayed
        if dry and GRAPH[0] in flags:
            flags += [GRAPH[0], "none"]  # a CPU has none
        words = ("fivefold", "verify", recipe, "--nproc", "1", *ONE_RANK, "--steps", steps, *flags)
        words += ("--device", "cpu" if dry else "cuda")
        for precision in ("fp64", "bf16", *(["fp16"] if name in IN_FP16 else [])):
            named[f"{name}, {precision}"] = (*words, "--precision", precision)
    yield from side_by_side(named, limit=150, share=1)


def ranks(dry: bool) -> Iterator[tuple[str, Outcome]]:
    """Several ranks on one GPU against one device: streams followed, and streams held up."""
    named: dict[str, tuple[str, ...]] = {}
    for name, flags in RANKS.items():
        words = ("fivefold", "verify", *flags, "--steps", "2", "--device", "cpu" if dry else "cuda")
        words += ("--distributed-timeout-minutes", "1")  # who hangs says so
        named[name] = words if dry else (*words, "--races")
        if not dry:
            named[f"{name}, delayed"] = (*words, "--delays", "1")
    yield from side_by_side(named, limit=150, share=3)


def script(module: str, dry: bool) -> Iterator[tuple[str, Outcome]]:
    """A benchmark that prints its rows."""
    yield module, run(f"benchmarks.{module}", *(["--dry"] if dry else []), limit=SLOW)


def train(dry: bool) -> Iterator[tuple[str, Outcome]]:
    """A few steps from the command line, saved and continued; with offloading; in fp8."""
    sizes = () if dry else ("--num-layers", "4", "--hidden-size", "2048", "--seq-length", "4096")
    for name, more in (("plain", ()), ("offloaded", OFFLOADS), ("fp8", FP8)):
        with tempfile.TemporaryDirectory() as folder:
            words = ["fivefold", "train", "debug", *ONE_RANK, *sizes]
            words += ["--bf16", "--lr-warmup-iters", "0", "--save", "run", *more]
            first = run(*words, "--train-iters", "6", limit=120, folder=Path(folder))
            yield name, first
            if first.passed:
                again = run(*words, "--train-iters", "8", limit=120, folder=Path(folder))
                yield f"{name}, continued", again


def calibrate(dry: bool) -> Iterator[tuple[str, Outcome]]:
    """Measured rates of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("fivefold", "plan", "--calibrate", "measured.toml")
        outcome = run(*words, limit=180, folder=Path(folder))
        file = Path(folder, "measured.toml")
        text = file.read_text() if file.exists() else ""
        yield "rates", Outcome(outcome.passed, outcome.seconds, outcome.last, ({"file": text},))


PARTS: dict[str, Callable[[bool], Iterator[tuple[str, Outcome]]]] = {
    "twins": twins,
    "verify": verify,
    "ranks": ranks,
    "layers": partial(script, "gpu_layers"),
    "losses": partial(script, "gpu_losses"),
    "eight_bit": partial(script, "gpu_eight_bit"),
    "messages": partial(script, "gpu_messages"),
    "updates": partial(script, "gpu_updates"),
    "host": partial(script, "gpu_host"),
    "train": train,
    "runs": partial(script, "gpu_runs"),
    "calibrate": calibrate,
}


def hardware() -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        one = torch.cuda.get_device_properties(0)
        found |= {"gpu": one.name, "memory_bytes": one.total_memory, "cuda": torch.version.cuda}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    results = ROOT / "benchmarks" / "results" / f"gpu-{datetime.date.today()}.json"
    parser.add_argument("--json", type=Path, default=None, help=f"default: {results}; dry: none")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("error: no GPU is visible\n  works: python -m benchmarks.gpu --dry", file=sys.stderr)
        return 2
    file = asked.json or (None if asked.dry else results)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "dry": asked.dry,
        "parts": {},
    }
    failed = 0
    for part in asked.parts:
        found = report["parts"][part] = {}
        for name, outcome in PARTS[part](asked.dry):
            failed += not outcome.passed
            state = "passed" if outcome.passed else "FAILED"
            print(f"{state}  {outcome.seconds:6.1f} s  {part}: {name}", flush=True)
            shown = outcome.last.splitlines()[-SHOWN:]
            print("".join(f"    {line}\n" for line in shown), end="")
            for row in outcome.rows:
                print(_shown(row), end="", flush=True)
            found[name] = vars(outcome)
            if file is not None:  # after each, since a borrowed machine may be gone before the end
                write_atomic(file, json.dumps(report, indent=1).encode())
    ended = f"{failed} failed" if failed else "all passed"
    print(ended if file is None else f"{ended}: {file}")
    return 1 if failed else 0


def _shown(row: dict[str, Any]) -> str:
    """A line for a row; the text of a file is in the results only."""
    shown = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name != "file"
    )
    return f"    {shown}\n" if shown else ""


if __name__ == "__main__":
    raise SystemExit(main())
