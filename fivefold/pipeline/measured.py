"""When the acts of a real step ran: what a profiled run leaves in its folder."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from fivefold.errors import ConfigError
from fivefold.files import write_atomic
from fivefold.pipeline.costs import Costs
from fivefold.pipeline.exchange import program_of
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import COMPUTE, Act, Kind, Program
from fivefold.pipeline.simulate import Simulation, replay
from fivefold.pipeline.validate import validate

FILE = "pipeline.jsonl"  # in a run folder: one act a line, of one profiled step
_LEAST = 1e-9  # seconds: what took no measurable time still took some


@dataclass(frozen=True)
class MeasuredAct:
    """A compute act of a rank of the pipeline.

    Attributes:
        rank: on the pipeline axis.
        kind: name of its `Kind`: F, B, W, BW, R; the halves of an FB are written as they ran.
        stage: of the program.
        mb: microbatch.
        start: seconds, on one clock for all ranks.
        end: seconds.
        slice: of the sequence.
        part: of a W that is cut up.
    """

    rank: int
    kind: str
    stage: int
    mb: int
    start: float
    end: float
    slice: int = 0
    part: int = 0


def write_measured(path: Path, acts: Iterable[MeasuredAct]) -> None:
    """Write what `read_measured` reads."""
    write_atomic(path, "".join(json.dumps(asdict(act)) + "\n" for act in acts))


def read_measured(path: Path) -> list[MeasuredAct]:
    """The acts of a file, or of the file of that name in a run folder.

    Raises:
        ConfigError: there is none, or a line of it is wrong.
    """
    file = path / FILE if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    acts = []
    for number, line in enumerate(lines, 1):
        try:
            acts.append(MeasuredAct(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}:{number}: no measured act: {error}") from error
    return acts


def measured_program(acts: Iterable[MeasuredAct]) -> tuple[Program, Simulation]:
    """What ran, and when.

    Raises:
        ProgramError: the acts are not those of a whole step.
    """
    ranks: dict[int, list[MeasuredAct]] = defaultdict(list)
    for act in sorted(acts, key=lambda act: (act.start, act.end)):
        if act.kind in COMPUTE:
            ranks[act.rank].append(act)
    program = program_of(
        {
            rank: [Act(Kind(a.kind), a.stage, a.mb, a.slice, a.part) for a in row]
            for rank, row in ranks.items()
        }
    )
    validate(program)
    begin = min(row[0].start for row in ranks.values())
    times = [[(a.start - begin, a.end - begin) for a in ranks[r]] for r in range(len(ranks))]
    return program, replay(program, times)


def median_costs(program: Program, simulation: Simulation) -> Costs:
    """Of each stage, and of the messages that a rank had to wait for.

    A backward in one piece counts half as dX and half as dW, unless the stage has others in two.
    """
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for row in simulation.timeline:
        for timed in row:
            times[timed.act.kind, timed.act.stage].append(timed.end - timed.start)

    def of(kind: Kind, stage: int) -> float:
        whole = median(times[Kind.BW, stage]) / 2 if times[Kind.BW, stage] else 0.0
        return median(times[kind, stage]) if times[kind, stage] else whole

    stages = range(program.num_stages)
    parts, slices = program.num_weight_parts, program.num_slices
    forward = tuple(max(of(Kind.F, s) * slices, _LEAST) for s in stages)
    backward = tuple(max(of(Kind.B, s) * slices, _LEAST) for s in stages)
    weights = tuple(of(Kind.W, s) * parts * slices for s in stages)
    return Costs(forward, backward, weights, simulation.median_flight)


def explained_makespan(program: Program, simulation: Simulation) -> float:
    """How long the program takes if each act takes the time that was measured of it.

    What was measured beyond that is neither an act nor a wait for one: messages, and the machine.
    """
    graph = dependency_graph(program)
    times = [timed.end - timed.start for row in simulation.timeline for timed in row]
    _, ends = graph.longest_paths([*times, *(simulation.median_flight for _ in graph.messages)])
    return max(ends)
