"""Faults put into a run: what goes wrong, on which rank, in which phase of which step.

`run_all(["--torchrun"?, CORPUS, FOLDER, CASE...])` runs cases, each a name such as
`kill-backward-1-tp2dp2`, one after the other in one process that has imported torch once, and
prints a line of JSON for each. In a rank of torchrun, it runs one.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.cli.main import main
from fivefold.mesh.slices import local_tensor
from fivefold.optim.adamw import AdamW
from fivefold.parallel_model import ParallelModel
from fivefold.pipeline.run.executor import ProgramRun
from fivefold.train import places, run
from fivefold.train.engine import Engine
from fivefold.train.ranks.rank_env import read_rank_env

STEP = 2  # in which a fault happens; every step saves
TIMEOUT_SECONDS = 12.0
WATCHDOG_SECONDS = 4.0
SHARD = "--data-parallel-sharding-strategy"
HSDP = f"--num-distributed-optimizer-instances 2 {SHARD} optim"
LAYOUTS = {  # ranks, flags
    "replicas": (2, ""),
    "zero1": (2, f"{SHARD} optim"),
    "zero2": (2, f"{SHARD} optim_grads"),
    "zero3": (2, f"{SHARD} optim_grads_params"),
    "hsdp": (4, HSDP),
    "tp2dp2": (4, f"--tp 2 --sequence-parallel {SHARD} optim"),
    "pp2": (2, "--pp 2"),
    "pp2tp2": (4, "--pp 2 --tp 2"),
    "pp2zero3": (4, f"--pp 2 {SHARD} optim_grads_params"),
    "cp2": (2, "--cp 2"),
}
PHASES: dict[str, tuple[Any, str]] = {  # what is called in it
    "start": (places, "init_process_group"),
    "data": (run, "make_trainer"),
    "forward": (ProgramRun, "_forward"),
    "backward": (ProgramRun, "_differentiate"),
    "reduction": (ParallelModel, "finish_gradients"),
    "optimizer": (AdamW, "step"),
    "save": (Checkpointer, "_write"),
}


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("planted")


DEEDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(0),
    "sysexit": lambda: sys.exit(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "raise": fail,
}
SUBJECTS = ("activation", "loss", "gradient", "cotangent", "parameter", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """`deed` is one of DEEDS or of SUBJECTS, which become NaN; `phase` one of PHASES, or empty."""

    deed: str
    phase: str
    rank: int
    layout: str

    @classmethod
    def of(cls, name: str) -> "Case":
        deed, phase, rank, layout = name.split("-")
        return cls(deed, phase, int(rank), layout)

    def __str__(self) -> str:
        return f"{self.deed}-{self.phase}-{self.rank}-{self.layout}"

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]


@dataclass(frozen=True)
class Outcome:
    status: int
    seconds: float
    errors: str


@contextmanager
def planted(case: Case) -> Iterator[None]:
    """In this process and those that it forks."""
    with ExitStack() as stack:
        if case.deed in DEEDS:
            owner, name = PHASES[case.phase]
            stack.enter_context(_before(owner, name, case, DEEDS[case.deed]))
        else:
            stack.enter_context(_not_a_number(case))
        yield


def _here(case: Case) -> bool:
    return read_rank_env().rank == case.rank


@contextmanager
def _before(owner: Any, name: str, case: Case, deed: Callable[[], None]) -> Iterator[None]:
    original = getattr(owner, name)
    steps = _Steps()

    def faulty(*args: Any, **settings: Any) -> Any:
        if _here(case) and (case.phase in ("start", "data") or steps() >= STEP):
            deed()
        return original(*args, **settings)

    with patch.object(owner, name, faulty), _counting(steps):
        yield


class _Steps:
    """The step under way, in each process."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@contextmanager
def _counting(steps: _Steps) -> Iterator[None]:
    original = Engine.step

    def counted(engine: Engine, *args: Any, **settings: Any) -> Any:
        steps.now = engine.steps + 1
        return original(engine, *args, **settings)

    with patch.object(Engine, "step", counted):
        yield


@contextmanager
def _not_a_number(case: Case) -> Iterator[None]:
    """What `case.deed` names is NaN on one rank in one step; nothing that is done for it is
    collective. A gradient, spoilt after all sums, is so only once."""
    steps, done = _Steps(), []
    originals = {owner: getattr(*owner) for owner in _SEAMS.values()}

    def due() -> bool:
        return _here(case) and steps() == STEP

    def spoil(tensor: torch.Tensor) -> None:
        if done:
            return
        done.append(True)
        with torch.no_grad():
            local_tensor(tensor).view(-1)[-1] = float("nan")

    def parameter_of(model: ParallelModel) -> torch.nn.Parameter:
        return next(p for p in model.parameters().values() if local_tensor(p).numel())

    def run_stage(step: ProgramRun, act: Any, x: torch.Tensor | None) -> torch.Tensor:
        module = step._on.stages[act.stage]
        wanted = {"loss": module.parts.head, "activation": True, "cotangent": True}
        if not due() or not wanted.get(case.deed):
            return originals[ProgramRun, "_run_stage"](step, act, x)
        spoilt = module if case.deed == "loss" else [*module.layers.values()][-1].mlp
        forward = spoilt.forward

        def spoil_forward(*inputs: Any) -> torch.Tensor:
            out = forward(*inputs)
            if case.deed == "cotangent":
                out.register_hook(lambda grad: grad * float("nan"))
                return out
            return out * float("nan")

        with patch.object(spoilt, "forward", spoil_forward):
            return originals[ProgramRun, "_run_stage"](step, act, x)

    def finish_gradients(model: ParallelModel) -> None:
        originals[ParallelModel, "finish_gradients"](model)
        if case.deed == "gradient" and due():
            grad = parameter_of(model).grad
            assert grad is not None
            spoil(grad)

    def gradients(engine: Engine, *args: Any, **settings: Any) -> Any:
        if case.deed == "parameter" and due():
            spoil(parameter_of(engine.model))
        return originals[Engine, "gradients"](engine, *args, **settings)

    def step_optimizer(optimizer: AdamW, *args: Any) -> None:
        if case.deed in ("exp_avg", "exp_avg_sq") and due():
            name = next(n for n, p in optimizer._leaves.items() if p.numel())
            spoil(optimizer.state_tensors()[f"optim.{case.deed}.{name}"].local)
        originals[AdamW, "step"](optimizer, *args)

    faulty = (run_stage, finish_gradients, gradients, step_optimizer)
    with ExitStack() as stack:
        for owner, function in zip(_SEAMS.values(), faulty, strict=True):
            stack.enter_context(patch.object(*owner, function))
        stack.enter_context(_counting(steps))
        yield


_SEAMS: dict[str, tuple[Any, str]] = {
    "stage": (ProgramRun, "_run_stage"),
    "gradient": (ParallelModel, "finish_gradients"),
    "parameter": (Engine, "gradients"),
    "moment": (AdamW, "step"),
}


def command(case: Case, corpus: Path, folder: Path, *, nproc: bool = True) -> list[str]:
    ranks, flags = LAYOUTS[case.layout]
    words = ["train", "debug", "--train-iters", "4", "--seq-length", "32", "--save-interval", "1"]
    words += ["--num-layers", "2"]
    words += [
        "--global-batch-size",
        "4",
        "--distributed-timeout-minutes",
        str(TIMEOUT_SECONDS / 60),
        "--watchdog-timeout-seconds",
        str(WATCHDOG_SECONDS),
    ]
    words += ["--data-path", str(corpus), "--data-cache-path", str(corpus / "cache")]
    words += ["--save", str(folder / str(case)), *flags.split()]
    return words + (["--nproc", str(ranks)] if nproc else [])


def run_here(case: Case, corpus: Path, folder: Path) -> Outcome:
    """Run a case in processes forked from this one, whose stderr is caught meanwhile."""
    sys.stderr.flush()
    kept = os.dup(2), os.dup(1)
    with tempfile.TemporaryFile() as file, open(os.devnull, "wb") as nothing:
        os.dup2(file.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
        began = time.monotonic()
        try:
            with planted(case):
                status = main(command(case, corpus, folder))
        finally:
            seconds = time.monotonic() - began
            sys.stderr.flush()
            sys.stdout.flush()
            os.dup2(kept[0], 2)
            os.dup2(kept[1], 1)
            for descriptor in kept:
                os.close(descriptor)
        file.seek(0)
        return Outcome(status, seconds, file.read().decode())


def run_all(words: Sequence[str]) -> int:
    torchrun = words[0] == "--torchrun"
    corpus, folder, *names = words[torchrun:]
    for name in names:
        case = Case.of(name)
        if torchrun:
            with planted(case):
                return main(command(case, Path(corpus), Path(folder), nproc=False))
        outcome = run_here(case, Path(corpus), Path(folder))
        print(json.dumps({"case": name, **asdict(outcome)}), flush=True)
    return 0


def run_and_leave(words: Sequence[str]) -> None:
    """In a process of its own."""
    sys.exit(run_all(words))
