"""What a transformer layer costs the host: CPU seconds and operations launched, beside its peers'.

    python -m benchmarks.host [--path DIR ...] [--systems fivefold ...] [--device cuda]
                              [--starts 5] [--rounds 5] [--runs 20] [--into FILE.json]

Forward and backward of a Llama layer for one microbatch, whose tensors are so small that the
kernels take next to nothing, without tensor parallelism and with two ranks of it (and sequence
parallelism), of which one runs and the other is pretended, so that no message takes time. Every
layout runs on all systems in turn, so that a busy machine is busy for all, and each system is
started several times; the least times count. They are in fp32 on a CPU, where kernels of bf16 are
slow, else in bf16; operations are those in bf16. PyTorch's LayerNorm stands for RMSNorm, which has
one kernel each way on a GPU only. `--path` names folders where peers are installed, which drag in
more than they need:

    pip install --no-deps --target DIR megatron-core==0.16.1
    pip install --no-deps --target DIR torchtitan==0.3.0 spmd_types==0.2.3 tyro \
        docstring_parser torchdata einops
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("fivefold", "torchtitan", "megatron")
TENSOR_PARALLEL = (1, 2)
WAYS = ("forward", "backward")


class System:
    """A process that holds one system's layers, and runs them when asked."""

    def __init__(self, name: str, tp: int, device: str, dtype: str, paths: list[str]) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]),
            "TORCHDYNAMO_DISABLE": "1",  # megatron-core compiles some functions when imported
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        module = f"benchmarks.host_systems.{name}"
        command = [sys.executable, "-m", module, str(tp), device, dtype]
        pipe = subprocess.PIPE
        self.process: Any = subprocess.Popen(
            command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe
        )

    def ask(self, runs: int) -> dict[str, float]:
        """Seconds of so many runs; at 0, what a run launches.

        Raises:
            RuntimeError: the process has ended; the last line of what it said.
        """
        try:
            self.process.stdin.write(f"{runs}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            said = self.process.stderr.read().strip().splitlines()
            raise RuntimeError(said[-1] if said else "ended without a word")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def started(asked: argparse.Namespace, tp: int, dtype: str) -> Iterator[dict[str, System]]:
    """The systems that can run, by name; says which cannot."""
    every = {name: System(name, tp, asked.device, dtype, asked.path) for name in asked.systems}
    try:
        able = {}
        for name, system in every.items():
            try:
                system.ask(1)
                able[name] = system
            except RuntimeError as error:
                print(f"tp {tp}, {name} is left out: {error} (--help tells how to install it)")
        yield able
    finally:
        for system in every.values():
            system.process.kill()
            system.process.communicate()


def measured(asked: argparse.Namespace, tp: int) -> dict[str, dict[str, Any]]:
    """Launches and least seconds of each system, and their ratios to Fivefold's.

    A process may be half as fast as the next for all its life, by where its memory lies: each
    system is started several times.
    """
    with started(asked, tp, "bfloat16") as systems:
        launches = {name: system.ask(0) for name, system in systems.items()}
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(asked.starts):
        with started(asked, tp, "bfloat16" if asked.device == "cuda" else "float32") as systems:
            for _ in range(asked.rounds):
                rounds.append({name: system.ask(asked.runs) for name, system in systems.items()})
    least = {n: min((t[n] for t in rounds), key=lambda each: sum(each.values())) for n in launches}
    found: dict[str, dict[str, Any]] = {}
    for name, taken in least.items():
        microseconds = {way: round(1e6 * taken[way], 1) for way in WAYS}
        found[name] = {"launches": launches[name], "microseconds": microseconds}
        if "fivefold" in least:
            ratio = sum(taken.values()) / sum(least["fivefold"].values())
            found[name]["ratio"] = round(ratio, 3)
    return found


def summary(results: dict[str, Any]) -> str:
    """Markdown: launches of a layer, and host time relative to Fivefold's, for speed.md."""
    rows = {key: found for key, found in results.items() if key.startswith("tp ")}
    names = list(rows["tp 1"])
    lines = [
        f"| launches forward + backward; host time relative to Fivefold's | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for key, found in rows.items():
        launched = {n: [found[n]["launches"][way] for way in WAYS] for n in names}
        fewest, least = min(map(sum, launched.values())), min(found[n]["ratio"] for n in names)
        cells = []
        for name in names:
            count = "{:.0f} + {:.0f}".format(*launched[name])
            count = f"**{count}**" if sum(launched[name]) == fewest else count
            ratio = f"{found[name]['ratio']:.3g}"
            cells.append(f"{count}; {f'**{ratio}**' if found[name]['ratio'] == least else ratio}")
        tp = int(key.removeprefix("tp "))
        label = "1 rank" if tp == 1 else f"TP{tp} + SP"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", action="append", default=[], help="where a peer is installed")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--starts", type=int, default=5, help="processes of each system, in turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each process")
    parser.add_argument("--runs", type=int, default=20, help="runs of a system in each round")
    parser.add_argument("--into", type=Path, help="file for the results")
    asked = parser.parse_args()
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "device": asked.device,
    }
    print(f"{'':<20}{'launches':>20}{'host, us':>20}{'of Fivefold':>13}")
    for tp in TENSOR_PARALLEL:
        results[f"tp {tp}"] = found = measured(asked, tp)
        for name, numbers in found.items():
            launched, taken = numbers["launches"], numbers["microseconds"]
            shown = "{:.0f} + {:.0f}".format(*(launched[way] for way in WAYS))
            times = "{:.0f} + {:.0f}".format(*(taken[way] for way in WAYS))
            print(f"tp {tp}, {name:<14}{shown:>20}{times:>20}{numbers.get('ratio', ''):>13}")
        if asked.into is not None:
            asked.into.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
