"""Fivefold and its peers side by side: CPU seconds, tokens/s, start-up and memory per layout.

    python benchmarks/peers.py [--rows one dp2 ...] [--systems pytorch ...] [--steps 5]

Every row is measured on each system in turn, in several rounds, so that a busy machine is busy
for all. CPU seconds per step (user + system of every rank, summed) are the stable figure; the
same model trains from the same weights on the same tokens in pytorch, deepspeed and megatron.
DeepSpeed and megatron-core live in a virtual environment of their own, made when missing:
.venv-peers, or $FIVEFOLD_PEERS_VENV.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peer_systems.rows import EXPERT_ROWS, ROWS, Row  # noqa: E402

PEERS_VENV = Path(os.environ.get("FIVEFOLD_PEERS_VENV", ROOT / ".venv-peers"))
TORCH = "torch==2.13.0"
PEERS = ("deepspeed==0.19.8", "megatron-core==0.16.1")
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT = 300  # seconds for one run; the slowest takes about 30


@dataclass(frozen=True)
class System:
    """How a module of benchmarks/peer_systems is run.

    Attributes:
        own_launcher: it starts its ranks itself; the others are started by torchrun.
        peer: it lives in the peers' virtual environment.
        script: its module; "": that of its name.
    """

    name: str
    own_launcher: bool = False
    peer: bool = False
    script: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> list[str]:
        return ["-m", f"benchmarks.peer_systems.{self.script or self.name}"]

    @property
    def python(self) -> str:
        return str(PEERS_VENV / "bin" / "python") if self.peer else sys.executable


SYSTEMS = {
    system.name: system
    for system in (
        System("pytorch"),
        System("deepspeed", peer=True, environment={"DS_ACCELERATOR": "cpu"}),
        System("megatron", peer=True, environment={"TORCHDYNAMO_DISABLE": "1"}),
        System("fivefold", own_launcher=True),
    )
}


def main() -> None:
    asked = parse(__doc__, "peers", ROWS, SYSTEMS)
    rows = [row for row in ROWS.values() if row.name in {"one", *asked.rows}]
    print(render(compare(asked, SYSTEMS, rows)))


def compare(
    asked: argparse.Namespace, systems: Mapping[str, System], rows: Sequence[Row]
) -> dict[str, Any]:
    """Measure every row on each system that has it, in turn; the report as it is saved."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    if any(systems[name].peer for name in asked.systems):
        make_peers_venv()
    about = {name: answer(systems[name], ["--supports"]) for name in asked.systems}
    runs: dict[tuple[str, str], list[dict]] = {}
    for turn in range(asked.rounds):
        for row in rows:
            for name in in_turn(about, turn):
                if row.name in about[name].get("rows", ()):
                    print(f"round {turn + 1}: {row.label}, {name}", file=sys.stderr)
                    run = measure(systems[name], row, asked.steps, asked.warmup)
                    runs.setdefault((row.name, name), []).append(run)
            save(asked, about, runs)
    report: dict[str, Any] = json.loads(asked.json.read_text())
    return report


def in_turn(systems: Iterable[str], turn: int) -> list[str]:
    """The systems in the order of a round, every second one from the last to the first: who ran
    just before can make a run slower."""
    return list(systems)[:: -1 if turn % 2 else 1]


def save(asked: argparse.Namespace, about: dict, runs: dict) -> None:
    """Write every run so far and the medians, so that an interrupted benchmark keeps them."""
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {key: getattr(asked, key) for key in ("steps", "warmup", "rounds")},
        "systems": about,
        "results": [
            {"row": row, "system": system, "median": middle(done), "runs": done}
            for (row, system), done in runs.items()
        ],
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(report, indent=1) + "\n")


def parse(
    doc: str | None, name: str, rows: Mapping[str, Row], systems: Mapping[str, System]
) -> argparse.Namespace:
    """What to measure of these rows and systems, and where results go that are called `name`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows))
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, at least one")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each cell; medians count")
    results = ROOT / "benchmarks" / "results" / f"{name}-{datetime.date.today()}.json"
    parser.add_argument("--json", type=Path, default=results)
    asked = parser.parse_args()
    if asked.warmup < 1:
        parser.error("--warmup must be at least 1: the first step sets things up")
    return asked


def make_peers_venv() -> None:
    """Install the peers with a CPU build of torch, which keeps CUDA's packages out."""
    done = PEERS_VENV / "peers.json"
    wanted = json.dumps([TORCH, *PEERS])
    if done.exists() and done.read_text() == wanted:
        return
    print(f"making {PEERS_VENV}", file=sys.stderr)
    venv.create(PEERS_VENV, with_pip=True, symlinks=True)
    pip = [str(PEERS_VENV / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--extra-index-url", CPU_TORCH_INDEX, f"{TORCH}+cpu"], check=True)
    subprocess.run([*pip, "setuptools", "numpy", TORCH, *PEERS], check=True)
    measure(SYSTEMS["deepspeed"], ROWS["one"], steps=1, warmup=1)  # compiles its operators, once
    done.write_text(wanted)


def measure(system: System, row: Row, steps: int, warmup: int) -> dict:
    worker = ["--row", row.name, "--steps", str(steps), "--warmup", str(warmup)]
    if system.own_launcher or row.ranks == 1:
        return answer(system, worker)
    ranks = ["--standalone", "--nproc-per-node", str(row.ranks)]
    return answer(system, worker, ["-m", "torch.distributed.run", *ranks])


def answer(system: System, words: list[str], launcher: list[str] | None = None) -> dict:
    """Run a system's module and read the JSON line it says, or {"error": ...}."""
    single: dict[str, Any] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    single |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment = {
        **os.environ,
        **system.environment,
        **({} if system.own_launcher else {key: str(value) for key, value in single.items()}),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PEERS_LAUNCHED": str(time.time()),
    }
    process = subprocess.Popen(
        [system.python, *(launcher or []), *system.module, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {TIMEOUT} s"}
    finally:
        if process.poll() is None:
            stop(process)
    said = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not said:
        for folder in (ROOT, PEERS_VENV.parent):  # which are this machine's own
            errors = errors.replace(f"{folder}/", "")
        return {"error": errors[-2000:]}
    return json.loads(said[-1])


def stop(process: subprocess.Popen) -> None:
    """Let the launcher end its ranks, which are in sessions of their own; insist after a while."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def machine() -> dict:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def middle(runs: list[dict]) -> dict | None:
    """The median of every figure over the runs that worked; the losses of the first of them."""
    worked = [run for run in runs if "error" not in run]
    if not worked:
        return None
    keys = [key for key, value in worked[0].items() if isinstance(value, float)]
    figures: dict = {key: median(run[key] for run in worked) for key in keys}
    return figures | {"loss": worked[0]["loss"]}


def medians(report: dict) -> dict:
    """The median figures of every row and system that was measured; None where all runs failed."""
    return {(cell["row"], cell["system"]): cell["median"] for cell in report["results"]}


def summary(report: dict) -> str:
    """Markdown: CPU seconds of a step, the README's table."""
    return "\n".join(table(report, medians(report), cpu_cell))


def render(report: dict) -> str:
    """Markdown: what was measured and when, then one table a figure."""
    found = medians(report)
    versions = "; ".join(
        name + ": " + ", ".join(f"{package} {v}" for package, v in able["versions"].items())
        if "versions" in able
        else f"{name}: not measured ({able['error'].strip().splitlines()[-1]})"
        for name, able in report["systems"].items()
    )
    return "\n".join(
        [
            f"{report['date']}, {report['machine']}, {report['settings']}",
            versions,
            "",
            "CPU s/step over all ranks (x of the system's own one rank); ** best of the row; "
            "! losses differ from its one rank's",
            summary(report),
            "",
            "tokens/s",
            *table(report, found, lambda cell, _, __: f"{cell['tokens_per_s']:.0f}"),
            "",
            "start to first finished step, s (after imports)",
            *table(report, found, startup_cell),
            "",
            "peak RSS summed over ranks, MiB (largest rank; summed PSS at the end)",
            *table(report, found, memory_cell),
        ]
    )


def table(report: dict, found: dict, show: Callable[..., str]) -> list[str]:
    systems = list(report["systems"])
    labels = {name: row.label for name, row in {**ROWS, **EXPERT_ROWS}.items()}
    lines = [f"| | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for row in dict.fromkeys(cell["row"] for cell in report["results"]):
        best = min(
            (found[row, name]["cpu_s_per_step"] for name in systems if found.get((row, name))),
            default=0.0,
        )
        cells = []
        for name in systems:
            if found.get((row, name)):
                cells.append(show(found[row, name], found.get(("one", name)), best))
            else:
                cells.append("failed" if (row, name) in found else "-")
        lines.append(f"| {labels[row]} | {' | '.join(cells)} |")
    return lines


def cpu_cell(cell: dict, one: dict | None, best: float) -> str:
    cost = cell["cpu_s_per_step"]
    text = f"**{cost:.3f}**" if cost == best else f"{cost:.3f}"
    if one is None:
        return text
    differ = max(abs(a - b) for a, b in zip(cell["loss"], one["loss"], strict=True)) > 1e-3
    return f"{text} ({cost / one['cpu_s_per_step']:.2f}x){' !' if differ else ''}"


def startup_cell(cell: dict, *_: Any) -> str:
    after = cell.get("first_step_after_import_s")
    return f"{cell['startup_s']:.1f}" + ("" if after is None else f" ({after:.1f})")


def memory_cell(cell: dict, *_: Any) -> str:
    return f"{cell['peak_rss_mb']:.0f} ({cell['peak_rss_max_mb']:.0f}; {cell['pss_mb']:.0f})"


if __name__ == "__main__":
    main()
