"""Real steps on this machine beside the simulator: `python benchmarks/timeline.py`.

Two ranks, one thread each, train with every schedule that two ranks take; `--profile` notes when
each act runs. The same program is simulated twice: with the time that each act took, and with the
median time of each stage's acts, which is what a plan knows. Of several runs the fastest step
counts: a machine that does other things disturbs the others more.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from fivefold.pipeline.costs.measured import measured_program, median_costs, read_measured
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Program
from fivefold.pipeline.simulate import Simulation, simulate

SCHEDULES = (
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
    "synthesised",
)
STEPS = 4


def measure(schedule: str, folder: Path, step: int) -> tuple[float, float, float]:
    """Seconds of one step: measured, simulated with each act's time, with median times."""
    command = f"""train debug --nproc 2 --pp 2 --pipeline-schedule {schedule} --precision fp32
        --hidden-size 256 --seq-length 256 --micro-batch-size 2 --global-batch-size 16
        --train-iters {step} --profile --profile-step-start {step} --profile-step-end {step + 1}
        --save {folder}"""
    subprocess.run(
        [sys.executable, "-m", "fivefold", *command.split()], check=True, stdout=subprocess.DEVNULL
    )
    program, measured = measured_program(read_measured(folder))
    with_medians = simulate(program, median_costs(program, measured))
    return measured.makespan, explained_makespan(program, measured), with_medians.makespan


def explained_makespan(program: Program, simulation: Simulation) -> float:
    """Simulated makespan if each action takes its measured time.

    The rest of the measured makespan is due to messages and the machine.
    """
    graph = dependency_graph(program)
    times = [timed.end - timed.start for row in simulation.timeline for timed in row]
    _, ends = graph.longest_paths([*times, *(simulation.median_flight for _ in graph.messages)])
    return max(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(f"{'schedule':<14} {'measured':>9} {'own times':>16} {'median times':>16}")
    for schedule in options.schedules:
        with tempfile.TemporaryDirectory() as folder:
            found = [measure(schedule, Path(folder) / str(n), STEPS) for n in range(options.runs)]
        measured, own, median = min(found)
        cells = [f"{value:>8.3f}s {measured / value:>6.3f}" for value in (own, median)]
        print(f"{schedule:<14} {measured:>8.3f}s {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
