"""When the acts of a real step ran: what a profiled run leaves in its folder."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shortened
from statistics import median
from typing import Any

from fivefold.errors import ConfigError, did_you_mean
from fivefold.files import as_kind, parse_json, read_text, write_atomic
from fivefold.pipeline.costs import Costs
from fivefold.pipeline.exchange import program_of
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import COMPUTE, Act, Kind, Program, ProgramError
from fivefold.pipeline.simulate import Simulation, replay
from fivefold.pipeline.validate import validate

FILE = "pipeline.jsonl"  # in a run folder: one act a line, of one profiled step
_LEAST = 1e-9  # seconds: what took no measurable time still took some
_KINDS = tuple(kind for kind in Kind if kind in COMPUTE and kind is not Kind.FB)
_MOST, _LATEST = 10**9, 1e12  # of what is counted; seconds


@dataclass(frozen=True)
class MeasuredAct:
    """A compute act of a rank of the pipeline.

    Attributes:
        rank: rank on the pipeline axis.
        kind: name of its `Kind`: F, B, W, BW, R; the halves of an FB are written as they ran.
        stage: stage of the program.
        mb: microbatch.
        start: seconds, on one clock for all ranks.
        end: seconds.
        slice: slice of the sequence.
        part: part of a W that is cut up.
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
    acts = []
    for number, line in enumerate(read_text(file, ConfigError).splitlines(), 1):
        try:
            acts.append(_read_act(line))
        except ConfigError as error:
            raise ConfigError(f"{file}:{number}: no measured act: {error}") from None
    return acts


def _read_act(line: str) -> MeasuredAct:
    table = parse_json(line, dict[str, Any], "the line", ConfigError)
    names = [field.name for field in fields(MeasuredAct)]
    for name in table:
        if name not in names:
            raise ConfigError(f"unexpected field {shortened(name)}{did_you_mean(name, names)}")
    act = as_kind(table, MeasuredAct, "the line", ConfigError)
    counts = (act.rank, act.stage, act.mb, act.slice, act.part)
    if not all(0 <= count < _MOST for count in counts):
        raise ConfigError(f"rank, stage, mb, slice and part must be in 0 .. {_MOST - 1}")
    if act.kind not in _KINDS:
        raise ConfigError(f"kind {shortened(act.kind)} is none of {', '.join(_KINDS)}")
    if not -_LATEST <= act.start <= act.end <= _LATEST:
        raise ConfigError(f"it goes from second {act.start:g} to second {act.end:g}")
    return act


def measured_program(acts: Iterable[MeasuredAct]) -> tuple[Program, Simulation]:
    """What ran, and when.

    Raises:
        ProgramError: the acts are not those of a whole step.
    """
    ranks: dict[int, list[MeasuredAct]] = defaultdict(list)
    for act in sorted(acts, key=lambda act: (act.start, act.end)):
        ranks[act.rank].append(act)
    program = program_of(
        {
            rank: [Act(Kind(a.kind), a.stage, a.mb, a.slice, a.part) for a in row]
            for rank, row in ranks.items()
        }
    )
    validate(program)
    if len({(act.start, act.end) for row in ranks.values() for act in row}) == 1:
        raise ProgramError("all acts ran at the same time, so that it cannot be told how long")
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
