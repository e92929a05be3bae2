"""Measured times of the pipeline actions of one training step, as a file in the run folder."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shortened
from statistics import median
from typing import Any

from fivefold.errors import ConfigError, Mistake, did_you_mean
from fivefold.files import as_kind, parse_json, read_text, write_atomic
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.exchange import program_of
from fivefold.pipeline.ir import ELEMENTARY, Act, Kind, Program, ProgramError, pair
from fivefold.pipeline.simulate import Simulation, replay
from fivefold.pipeline.validate import validate

FILE = "pipeline.jsonl"  # in a run folder: the actions of one profiled step, one per line
_LEAST = 1e-9  # seconds: substitute for unmeasurably short times
_MOST, _LATEST = 10**9, 1e12  # upper limits of indices, and of times in seconds


@dataclass(frozen=True)
class MeasuredAct:
    """The measured times of one compute action.

    Attributes:
        rank: pipeline rank.
        kind: name of its `Kind`: F, B, W, BW, R; an FB is written as its two halves, each with the
            times of the pair.
        stage: stage in the program.
        mb: microbatch.
        start: start in seconds, on one clock for all ranks.
        end: end in seconds.
        slice: sequence slice.
        part: index of the part, if W is split into parts.
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
    """Write actions in the format that `read_measured` reads."""
    write_atomic(path, "".join(json.dumps(asdict(act)) + "\n" for act in acts))


def read_measured(path: Path) -> list[MeasuredAct]:
    """Read the actions from a file, or from `pipeline.jsonl` in a run folder.

    Raises:
        ConfigError: there is no such file, or a line is invalid.
    """
    file = path / FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        what = f"{path} holds no profiled step: it has no {FILE}"
        raise ConfigError(Mistake(what, attempt="fivefold train ... --profile"))
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
    if act.kind not in ELEMENTARY:
        raise ConfigError(f"kind {shortened(act.kind)} is none of {', '.join(ELEMENTARY)}")
    if not -_LATEST <= act.start <= act.end <= _LATEST:
        raise ConfigError(
            f"start {act.start:g} s <= end {act.end:g} s must hold, each within {_LATEST:g} s of 0"
        )
    return act


def measured_program(acts: Iterable[MeasuredAct]) -> tuple[Program, Simulation]:
    """The program that ran, with its times.

    Raises:
        ProgramError: the actions are not those of a whole step.
    """
    ranks: dict[int, list[_Timed]] = defaultdict(list)
    for act in sorted(acts, key=lambda act: (act.start, act.end)):
        timed = Act(Kind(act.kind), act.stage, act.mb, act.slice, act.part), act.start, act.end
        row = ranks[act.rank]
        if row and (pair := _pair_of(row[-1], timed)):
            row[-1] = pair
        else:
            row.append(timed)
    program = program_of({rank: [act for act, *_ in row] for rank, row in ranks.items()})
    validate(program)
    if len({(start, end) for row in ranks.values() for _, start, end in row}) == 1:
        raise ProgramError(
            "all actions have the same start and end, so their durations are unknown"
        )
    begin = min(row[0][1] for row in ranks.values())
    times = [
        [(start - begin, end - begin) for _, start, end in ranks[r]] for r in range(len(ranks))
    ]
    return program, replay(program, times)


_Timed = tuple[Act, float, float]


def _pair_of(one: _Timed, other: _Timed) -> _Timed | None:
    """The FB whose halves these are, if both have the same start and end; else None."""
    if one[1:] != other[1:] or one[1] == one[2]:
        return None
    forward, backward = sorted((one[0], other[0]), key=lambda act: act.kind is not Kind.F)
    if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.BW):
        return None
    return pair(forward, backward), *one[1:]


def median_costs(program: Program, simulation: Simulation) -> Costs:
    """Median times of each stage, of pairs, and of the messages that a rank had to wait for.

    A BW counts half as dX and half as dW, unless the stage also has separate ones.
    """
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    pairs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in simulation.timeline:
        for timed in row:
            act, seconds = timed.act, timed.end - timed.start
            if act.kids:
                pairs[act.kids[0].stage, act.kids[1].stage].append(seconds)
            else:
                times[act.kind, act.stage].append(seconds)

    def of(kind: Kind, stage: int) -> float:
        whole = median(times[Kind.BW, stage]) / 2 if times[Kind.BW, stage] else 0.0
        return median(times[kind, stage]) if times[kind, stage] else whole

    stages = range(program.num_stages)
    parts, slices = program.num_weight_parts, program.num_slices
    forward = tuple(max(of(Kind.F, s) * slices, _LEAST) for s in stages)
    backward = tuple(max(of(Kind.B, s) * slices, _LEAST) for s in stages)
    weights = tuple(of(Kind.W, s) * parts * slices for s in stages)
    fb = tuple(
        tuple(
            median(pairs[ours, theirs])
            if (ours, theirs) in pairs
            else forward[ours] + backward[theirs] + weights[theirs]
            for theirs in stages
        )
        for ours in stages
    )
    return Costs(forward, backward, weights, simulation.median_flight, fb if pairs else None)
