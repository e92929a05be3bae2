"""Faults of every kind, planted in the ranks of a run: the inner half of `benchmarks.faults`.

    python -m benchmarks.planted_faults FOLDER train debug ...

runs `fivefold train debug ...` with the faults that `FOLDER/plan.json` lists. Each happens once: a
file `FOLDER/done-N` says so to ranks that start again. `FOLDER/journal` gets a line of JSON for
each fault and, from the first rank, for each finished step; the log gets a line where a fault
begins.
"""

import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.local import LocalCheckpoints
from fivefold.cli.main import main
from fivefold.mesh.slices import local_tensor
from fivefold.optim.adamw import AdamW
from fivefold.parallel_model import ParallelModel
from fivefold.pipeline.run.executor import ProgramRun
from fivefold.train.engine import Engine
from fivefold.train.loop import Trainer
from fivefold.train.ranks.rank_env import read_rank_env

PAUSE_SECONDS = 4.0
SLOW_SECONDS = 0.15
SLOW_STEPS = 3
PHASES: dict[str, tuple[Any, str]] = {  # what is called in it
    "step": (Engine, "step"),
    "forward": (ProgramRun, "_forward"),
    "backward": (ProgramRun, "_differentiate"),
    "reduction": (ParallelModel, "finish_gradients"),
    "optimizer": (AdamW, "step"),
    "save": (Checkpointer, "_write_files"),
    "state": (LocalCheckpoints, "_write"),
}


@dataclass(frozen=True)
class Fault:
    """A fault, and where it happens.

    Attributes:
        number: counts the faults of a run from 0.
        kind: one of DEEDS.
        step: the first step in which it may happen.
        rank: the rank to which it does.
        phase: one of PHASES.
    """

    number: int
    kind: str
    step: int
    rank: int
    phase: str


class Planter:
    """Carries out the plan in each process of a run, all of which are forked from this one."""

    def __init__(self, folder: Path, run: Path, memory: Path) -> None:
        self.folder, self.run, self.memory = folder, run, memory
        self.plan = [Fault(**fault) for fault in json.loads((folder / "plan.json").read_text())]
        self.engine: Engine | None = None
        self.slow_until = 0

    def write(self, **record: Any) -> None:
        """Add a line to the journal."""
        line = json.dumps({"time": time.time(), **record}) + "\n"
        with (self.folder / "journal").open("ab", buffering=0) as file:
            file.write(line.encode())

    def due(self, phase: str) -> Fault | None:
        """The fault that happens now on this rank, which then counts as done."""
        if self.engine is None:
            return None
        step, rank = (
            self.engine.steps + (phase != "save" and phase != "state"),
            self.engine.groups.rank,
        )
        for fault in self.plan:
            if (fault.rank, fault.phase) != (rank, phase) or step < fault.step:
                continue
            try:
                (self.folder / f"done-{fault.number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            self.write(fault=fault.number, step=step)
            os.write(2, f"\nfault {fault.number}\n".encode())  # at once: others write there, too
            return fault
        return None

    def before(self, phase: str) -> None:
        """Wrap what begins a phase."""
        owner, name = PHASES[phase]
        original = getattr(owner, name)

        def planted(*args: Any, **settings: Any) -> Any:
            if phase == "step":
                self.engine = args[0]
            if (fault := self.due(phase)) is not None:
                DEEDS[fault.kind](self, fault)
            if phase == "forward" and self.engine is not None:
                time.sleep(SLOW_SECONDS * (self.engine.steps < self.slow_until))
            return original(*args, **settings)

        setattr(owner, name, planted)

    def record_steps(self) -> None:
        """Have the first rank write each step to the journal, with the bits of its result."""
        original = Trainer._record
        planter = self

        def record(trainer: Trainer, result: Any, seconds: float) -> None:
            original(trainer, result, seconds)
            if trainer.console is not None:
                bits = [result.loss.hex(), result.grad_norm.hex()]
                planter.write(step=trainer.step, bits=bits, seconds=seconds)

        Trainer._record = record  # type: ignore[method-assign, assignment]


def die(planter: Planter, fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(planter: Planter, fault: Fault) -> None:
    os._exit(0)


def fail(planter: Planter, fault: Fault) -> None:
    assert planter.engine is not None
    raise OSError(f"planted in step {planter.engine.steps + 1}")


def stop(planter: Planter, fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(planter: Planter, fault: Fault) -> None:
    time.sleep(600)


def pause(planter: Planter, fault: Fault) -> None:
    time.sleep(PAUSE_SECONDS)


def slow(planter: Planter, fault: Fault) -> None:
    assert planter.engine is not None
    planter.slow_until = planter.engine.steps + SLOW_STEPS


def cut(planter: Planter, fault: Fault) -> None:
    """Shut down one connection to another rank, as a network would; the store's are left alone."""
    found, store = [], read_rank_env().master_port
    for entry in os.listdir("/proc/self/fd"):
        try:
            link = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with link:
            try:
                if store not in (link.getpeername()[1], link.getsockname()[1]):
                    found.append(link.dup())
            except OSError:
                continue
    chosen = random.Random(fault.number).choice(found)
    chosen.shutdown(socket.SHUT_RDWR)
    for link in found:
        link.close()


def fill_disk(planter: Planter, fault: Fault) -> None:
    """This process can write no more than 4 KB to a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))


def flip_checkpoint(planter: Planter, fault: Fault) -> None:
    """Change a bit of the latest checkpoint on the disk, then end all ranks."""
    latest = (planter.run / "checkpoints" / "latest").read_text().strip()
    folder = planter.run / "checkpoints" / f"step-{int(latest):08d}"
    flip_file(sorted(folder.iterdir()), fault)
    for path in planter.memory.glob("*/*/step-*"):
        shutil.rmtree(path, ignore_errors=True)
    die(planter, fault)


def flip_state(planter: Planter, fault: Fault) -> None:
    """Change a bit of the latest state in memory, then end this rank."""
    time.sleep(0.3)  # another rank may still be writing
    folders = sorted(planter.memory.glob("*/*/step-*"), key=lambda path: path.name)
    size = planter.engine.layout.grid.world_size if planter.engine else 0
    whole = [f for f in folders if len([*f.glob("rank-*")]) == size]
    flip_file(sorted(whole[-1].iterdir()), fault)
    die(planter, fault)


def flip_file(paths: list[Path], fault: Fault) -> None:
    chance = random.Random(fault.number)
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    print(f"planted in byte {place} of {len(data)} of {path}", file=sys.stderr, flush=True)


def flip_bit(tensor: torch.Tensor, fault: Fault) -> None:
    chance = random.Random(fault.number)
    bits = tensor.detach().view(torch.int32).flatten()
    bits[chance.randrange(bits.numel())] ^= 1 << chance.randrange(31)


def flip_weight(planter: Planter, fault: Fault) -> None:
    assert planter.engine is not None
    parts = [local_tensor(p) for p in planter.engine.parameters.values()]
    flip_bit(random.Random(fault.number).choice([p for p in parts if p.numel()]), fault)


def flip_moment(planter: Planter, fault: Fault) -> None:
    assert planter.engine is not None
    moments = [piece.local for piece in planter.engine.optimizer.state_tensors().values()]
    flip_bit(random.Random(fault.number).choice([m for m in moments if m.numel()]), fault)


def spoil_gradient(planter: Planter, fault: Fault) -> None:
    assert planter.engine is not None
    parameters = planter.engine.trained.values()
    grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    chosen = random.Random(fault.number).choice([g for g in grads if g.numel()])
    with torch.no_grad():
        chosen.view(-1)[-1] = float("nan")


def ask_to_stop(planter: Planter, fault: Fault) -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def kill_launcher(planter: Planter, fault: Fault) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def lose_host(planter: Planter, fault: Fault) -> None:
    """All processes die, and what was in memory is gone."""
    shutil.rmtree(planter.memory, ignore_errors=True)
    os.kill(os.getppid(), signal.SIGKILL)


def spoil_metrics(planter: Planter, fault: Fault) -> None:
    """Overwrite the middle of metrics.jsonl, then end this rank."""
    path = planter.run / "metrics.jsonl"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\0" * 50)
    die(planter, fault)


def spoil_starts(planter: Planter, fault: Fault) -> None:
    """Cut environment.json in half, then end this rank."""
    path = planter.run / "environment.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    die(planter, fault)


def move_folder(planter: Planter, fault: Fault) -> None:
    planter.run.rename(planter.folder / "away")


def delete_folder(planter: Planter, fault: Fault) -> None:
    while planter.run.exists():  # a checkpoint may be written into it meanwhile
        shutil.rmtree(planter.run, ignore_errors=True)


DEEDS: dict[str, Callable[[Planter, Fault], None]] = {
    "rank killed": die,
    "rank killed as it saves": die,
    "rank left": leave,
    "rank raised": fail,
    "rank stopped": stop,
    "rank hangs": hang,
    "rank pauses": pause,
    "rank slow": slow,
    "connection cut": cut,
    "disk full": fill_disk,
    "bit in a checkpoint": flip_checkpoint,
    "bit in a state": flip_state,
    "bit in a weight": flip_weight,
    "bit in a moment": flip_moment,
    "gradient NaN": spoil_gradient,
    "asked to stop": ask_to_stop,
    "launcher killed": kill_launcher,
    "host lost": lose_host,
    "metrics damaged": spoil_metrics,
    "starts damaged": spoil_starts,
    "folder moved": move_folder,
    "folder deleted": delete_folder,
}


def write_plan(folder: Path, plan: list[Fault]) -> None:
    """Write the plan where the ranks look for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps([asdict(fault) for fault in plan]))


def run_with_faults(folder: Path, words: list[str]) -> int:
    """Run a command line of `fivefold` with the faults planned in a folder."""
    planter = Planter(folder, folder / "run", folder / "memory")
    planter.record_steps()
    for phase in PHASES:
        planter.before(phase)
    return main(words)


if __name__ == "__main__":
    sys.exit(run_with_faults(Path(sys.argv[1]), sys.argv[2:]))
