"""Pipeline schedules, Fivefold and torch.distributed.pipelining side by side.

    python benchmarks/pipeline.py [--ranks 2 4] [--schedules 1f1b zb_v] [--checkpoint] [--rounds 3]

The same layers, shapes and tokens, on gloo (initial weights are each system's own); both systems in
turn in every round, so that a busy machine is busy for both. CPU seconds per step (user + system of
every rank, summed) are the stable figure. Memory is what the ranks' resident sets grow by during a
step, with an allocator that gives back what is freed, in runs of its own. `--checkpoint` also
recomputes every block.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
ONE_STAGE = ("gpipe", "1f1b")
SYSTEMS = ("torch", "fivefold")
LAYERS, MICROBATCHES, MICROBATCH = 8, 8, 1
TIMEOUT = 300


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    system: str
    schedule: str
    ranks: int
    checkpoint: bool

    @property
    def stages(self) -> int:
        return self.ranks * (1 if self.schedule in ONE_STAGE else 2)


def main() -> None:
    asked = parse()
    if asked.worker:
        work(Cell(**json.loads(asked.worker)), asked.steps)
        return
    cells = [
        Cell(system, schedule, ranks, checkpoint)
        for ranks in asked.ranks
        for checkpoint in ((False, True) if asked.checkpoint else (False,))
        for schedule in asked.schedules
        for system in SYSTEMS
    ]
    runs: dict[Cell, list[dict]] = {cell: [] for cell in cells}
    memory: dict[Cell, dict] = {}
    for turn in range(asked.rounds):
        for cell in cells:
            print(f"round {turn + 1}: {cell}", file=sys.stderr)
            runs[cell].append(answer(cell, asked.steps))
            if turn == 0:
                memory[cell] = answer(cell, 1, MALLOC_MMAP_THRESHOLD_="65536")
            save(asked, runs, memory)
    print(render(json.loads(asked.json.read_text())))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--checkpoint", action="store_true", help="also recompute every block")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    results = ROOT / "benchmarks" / "results" / f"pipeline-{datetime.date.today()}.json"
    parser.add_argument("--json", type=Path, default=results)
    return parser.parse_args()


def answer(cell: Cell, steps: int, **environment: str) -> dict:
    """Measure a cell in processes of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(cell))]
    try:
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {TIMEOUT} s"}
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(said[-1]) if said else {"error": done.stderr[-2000:]}


def save(asked: argparse.Namespace, runs: dict[Cell, list[dict]], memory: dict[Cell, dict]) -> None:
    from importlib.metadata import version

    from benchmarks.peers import machine

    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "torch": version("torch"),
        "settings": {
            "layers": LAYERS,
            "microbatches": MICROBATCHES,
            "microbatch": MICROBATCH,
            "steps": asked.steps,
            "rounds": asked.rounds,
        },
        "results": [
            {**asdict(cell), "runs": runs[cell], "memory": memory[cell]}
            for cell in runs
            if runs[cell]
        ],
    }
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(report, indent=1) + "\n")


def render(report: dict) -> str:
    """Markdown: CPU seconds, wall seconds and memory of both systems, a row a schedule."""
    lines = [
        f"{report['date']}, {report['machine']}, torch {report['torch']}, {report['settings']}",
        "",
        "| | CPU s/step torch | Fivefold | s/step torch | Fivefold | MiB torch | Fivefold |",
        "|---" * 7 + "|",
    ]
    pairs: dict[tuple, dict[str, dict]] = {}
    for cell in report["results"]:
        key = (cell["ranks"], cell["checkpoint"], cell["schedule"])
        pairs.setdefault(key, {})[cell["system"]] = cell
    for (ranks, checkpoint, schedule), systems in pairs.items():
        cells = [
            figure
            for key in ("cpu_s", "wall_s", "peak_mib")
            for figure in compared([middle(systems.get(name, {}), key) for name in SYSTEMS], key)
        ]
        label = f"{schedule}, P={ranks}{', checkpointing' if checkpoint else ''}"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def middle(cell: dict, key: str) -> float | None:
    runs = [cell.get("memory", {})] if key == "peak_mib" else cell.get("runs", [])
    values = [run[key] for run in runs if key in run]
    return median(values) if values else None


def compared(values: list[float | None], key: str) -> list[str]:
    """Both figures, the smaller one bold."""
    found = [value for value in values if value is not None]
    digits = 0 if key == "peak_mib" else 2
    return [
        "failed"
        if value is None
        else f"**{value:.{digits}f}**"
        if value == min(found)
        else f"{value:.{digits}f}"
        for value in values
    ]


def work(cell: Cell, steps: int) -> None:
    """The processes of a measurement; rank 0 prints what was found."""
    from fivefold.train.ranks.launch import launch_local

    def rank(env: Any) -> None:
        import torch

        from benchmarks.peer_systems.common import end

        torch.set_num_threads(1)
        build = torch_step if cell.system == "torch" else fivefold_step
        end(measured(build(cell, env), steps))

    raise SystemExit(launch_local(rank, cell.ranks))


def measured(step: Any, steps: int) -> dict:
    """Two steps to warm up, then `steps`, then one whose memory is looked at."""
    import torch.distributed as dist

    from benchmarks.peer_systems.common import batch, memory_mib

    data = [batch(i, 0, 1) for i in range(steps + 3)]
    losses = [step(*data[i]) for i in range(2)]
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    losses += [step(*data[2 + i]) for i in range(steps)]
    dist.barrier()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    before = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step(*data[-1])
    found: list = [None] * dist.get_world_size()
    mine = {"cpu": cpu / steps, "peak": memory_mib()[0] - before, "loss": losses}
    dist.all_gather_object(found, mine)
    return {
        "cpu_s": sum(each["cpu"] for each in found),
        "wall_s": wall / steps,
        "peak_mib": sum(each["peak"] for each in found),
        "peak_mib_by_rank": [each["peak"] for each in found],
        "loss": next(each["loss"] for each in found if each["loss"][0] is not None),
    }


def resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def torch_step(cell: Cell, env: Any) -> Any:
    """A step of torch.distributed.pipelining on this rank."""
    import torch
    from torch.distributed import pipelining
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from benchmarks.peer_systems.common import ADAMW, Model, loss_of
    from fivefold.train.ranks.join import init_process_group

    init_process_group(env, "cpu")
    rank, last = env.rank, cell.stages - 1
    in_a_v = cell.schedule in ("zb_v", "dualpipe_v")
    mine = (
        [rank]
        if cell.stages == cell.ranks
        else [rank, last - rank if in_a_v else rank + cell.ranks]
    )
    models = [Model(stage, cell.stages, LAYERS) for stage in mine]
    if cell.checkpoint:
        for model in models:
            for name, block in model.layers.items():
                model.layers[name] = checkpoint_wrapper(block)
    stages = [
        pipelining.PipelineStage(model, stage, cell.stages, torch.device("cpu"))
        for model, stage in zip(models, mine, strict=True)
    ]
    schedule = getattr(pipelining, SCHEDULES[cell.schedule])(
        stages if cell.schedule not in ONE_STAGE else stages[0], MICROBATCHES, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], **ADAMW)

    def step(tokens_BS: Any, labels_BS: Any) -> float | None:
        losses: list = []
        inputs = (tokens_BS,) if 0 in mine else ()
        target = {"target": labels_BS, "losses": losses} if last in mine else {}
        schedule.step(*inputs, **target, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return sum(map(float, losses)) / len(losses) if losses else None

    return step


def fivefold_step(cell: Cell, env: Any) -> Any:
    """A step of Fivefold's engine on this rank."""
    import torch

    from benchmarks.peer_systems import common
    from fivefold.check import check
    from fivefold.config.config import Config
    from fivefold.config.model import ModelConfig
    from fivefold.data.packing import Microbatch
    from fivefold.train.engine import Engine
    from fivefold.train.ranks.join import init_process_group

    config = Config(
        ModelConfig(
            num_layers=LAYERS,
            hidden_size=common.HIDDEN,
            num_attention_heads=common.HEADS,
            ffn_hidden_size=common.FFN,
            vocab_size=common.VOCAB,
        )
    ).with_values(
        pipeline_model_parallel_size=cell.ranks,
        num_virtual_stages_per_pipeline_rank=cell.stages // cell.ranks,
        pipeline_schedule=cell.schedule,
        micro_batch_size=MICROBATCH,
        global_batch_size=MICROBATCH * MICROBATCHES,
        seq_length=common.SEQ,
        precision="fp32",
        lr=common.ADAMW["lr"],
        lr_decay_style="constant",
        weight_decay=common.ADAMW["weight_decay"],
        clip_grad=0.0,
        recompute_granularity="full" if cell.checkpoint else None,
    )
    engine = Engine(check(config, cell.ranks), env.rank, init_process_group(env, "cpu"))

    def step(tokens_BS: Any, labels_BS: Any) -> float:
        positions_BS = torch.arange(common.SEQ).expand(len(tokens_BS), common.SEQ).contiguous()
        documents_BS = torch.zeros_like(tokens_BS)
        fields = (tokens_BS, labels_BS, positions_BS, documents_BS, positions_BS)
        parts = zip(*(field.split(MICROBATCH) for field in fields), strict=True)
        return engine.step([Microbatch(*(p.numpy() for p in part)) for part in parts]).loss

    return step


if __name__ == "__main__":
    main()
