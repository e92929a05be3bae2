"""Pipeline programs as files: an action table, torch.distributed.pipelining's CSV, a Chrome trace.

Our table has one action per line, with its times, and represents every compute-only program.
Torch's has one line per rank, of actions such as 0F0 (forward), 0I0 (dX), 0W0 (dW), 0B0 (both) and
(0F1;0B0)OVERLAP_F_B; empty cells are steps in which a rank waits.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from fivefold.errors import ConfigError, Mistake
from fivefold.files import read_text
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.ir import COMPUTE, ELEMENTARY, Act, Kind, Program, ProgramError, pair
from fivefold.pipeline.validate import validate

_COLUMNS = ("rank", "kind", "stage", "microbatch", "slice", "part")
_TIMES = ("start", "end")

_TO_TORCH = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_FROM_TORCH = {text: kind for kind, text in _TO_TORCH.items()}
_TORCH_ACTION = re.compile(r"([0-9]{1,9})([A-Z_]+?)([0-9]{0,9})$")
_COUNT = re.compile(r"[0-9]{1,9}")
_TORCH_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B$")
_TORCH_ADDED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*$")


def to_csv(chart: Chart) -> str:
    """A table of all compute actions with their times.

    A pair has kind `F&B`; its stages and microbatches are written as `0&1`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, *_TIMES))
    for rank, row in enumerate(chart.simulation.timeline):
        for timed in row:
            kids = timed.act.elementary
            fields = zip(*((k.kind, k.stage, k.mb, k.slice, k.part) for k in kids), strict=True)
            cells = ("&".join(map(str, values)) for values in fields)
            writer.writerow((rank, *cells, f"{timed.start:.9g}", f"{timed.end:.9g}"))
    return text.getvalue()


def to_torch_csv(program: Program) -> str:
    """The compute-only CSV that torch.distributed.pipelining loads.

    Raises:
        ConfigError: torch has no notation for some of the program's actions.
    """

    def word(act: Act) -> str:
        if act.kids:
            return f"({';'.join(map(word, act.kids))})OVERLAP_F_B"
        if act.kind not in _TO_TORCH or program.num_slices > 1 or program.num_weight_parts > 1:
            raise ConfigError(f"torch.distributed.pipelining has no notation for {act}")
        return f"{act.stage}{_TO_TORCH[act.kind]}{act.mb}"

    if program.num_copies > 1:
        raise ConfigError("torch.distributed.pipelining does not support two copies of a model")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for acts in program.ranks:
        writer.writerow(word(act) for act in acts if act.kind in COMPUTE)
    return text.getvalue()


def read_csv(path: Path) -> Program:
    """Read and validate the program in a file of either format.

    Raises:
        ConfigError: the file cannot be read; names the wrong line.
        ProgramError: the program is not valid.
    """
    try:
        lines = list(csv.reader(read_text(path, ConfigError).splitlines()))
    except csv.Error as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    own = bool(lines) and tuple(lines[0][: len(_COLUMNS)]) == _COLUMNS
    ranks: dict[int, list[Act]] = {}
    for number, cells in enumerate(lines[own:], 1 + own):
        try:
            if own:
                ranks.setdefault(_count(cells[0]), []).append(_own_act(cells))
            else:
                ranks[number - 1] = [act for cell in cells for act in _torch_acts(cell)]
        except (ValueError, IndexError) as error:
            works = (",".join(_COLUMNS),) if own else ("0F0", "0I0", "0W0", "0B0")
            what = f"{path}:{number}: {','.join(cells)[:60]!r} is no line of a schedule"
            raise ConfigError(Mistake(what, (str(error),), works)) from error
    try:
        program = program_of(ranks)
        validate(program)
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from error
    return program


def program_of(ranks: Mapping[int, Sequence[Act]]) -> Program:
    """A program from the compute actions of its ranks; placement and counts are inferred.

    Raises:
        ProgramError: a rank has no actions, a stage is on two ranks, or a stage, microbatch, slice
            or part is missing.
    """
    owner: dict[int, int] = {}
    path: set[int] = set()  # stages of the first microbatch
    backward = False
    counted: dict[str, set[int]] = {"ranks": set(ranks), "microbatches": set()}
    counted |= {"slices": {0}, "parts": {0}}
    for rank, acts in ranks.items():
        for kid in (kid for act in acts for kid in act.elementary):
            if owner.setdefault(kid.stage, rank) != rank:
                raise ProgramError(f"{kid} is on rank {rank}, the stage on {owner[kid.stage]}")
            backward = backward or kid.kind is not Kind.F
            if kid.mb == 0:
                path.add(kid.stage)
            counted["microbatches"].add(kid.mb)
            counted["slices"].add(kid.slice)
            counted["parts"].add(kid.part)
    for name, found in (counted | {"stages": set(owner)}).items():
        if not found or found != set(range(len(found))):
            raise ProgramError(
                f"{name} must be 0 to the number of {name}, not {shortened(sorted(found))}"
            )
    return Program(
        tuple(owner[stage] for stage in range(len(owner))),
        len(counted["microbatches"]),
        tuple(tuple(ranks[rank]) for rank in range(len(ranks))),
        forward_only=not backward,
        num_copies=2 if path and 2 * len(path) == len(owner) else 1,
    )


def to_trace(charts: Sequence[Chart]) -> str:
    """Chrome's trace format, for chrome://tracing and Perfetto.

    Each chart is a process, each rank a thread. One unit of time is shown as a millisecond; a
    measured second as a second.
    """
    events = [event for pid, chart in enumerate(charts) for event in _events(pid, chart)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(pid: int, chart: Chart) -> Iterator[dict[str, Any]]:
    micro = 1e6 if chart.unit else 1e3
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": chart.title}}
    for rank, row in enumerate(chart.simulation.timeline):
        place = {"pid": pid, "tid": rank}
        yield {"ph": "M", **place, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for timed in row:
            yield {
                "ph": "X",
                **place,
                "name": chart.label(timed.act),
                "cat": str(timed.act.kind),
                "ts": timed.start * micro,
                "dur": (timed.end - timed.start) * micro,
                "args": {"what": str(timed.act)},
            }
        for time, held in chart.memory[rank]:
            name = f"rank {rank} holds"
            yield {"ph": "C", **place, "name": name, "ts": time * micro, "args": {"held": held}}
    for gap in chart.simulation.gaps:
        yield {
            "ph": "X",
            "pid": pid,
            "tid": gap.rank,
            "name": f"idle: {gap.reason}",
            "cat": "idle",
            "cname": "grey",
            "ts": gap.start * micro,
            "dur": (gap.end - gap.start) * micro,
        }


def _own_act(cells: Sequence[str]) -> Act:
    if len(cells) not in (len(_COLUMNS), len(_COLUMNS) + len(_TIMES)):
        raise ValueError(f"{len(cells)} cells, and there are {len(_COLUMNS)} columns and two times")
    fields = [cell.split("&") for cell in cells[1 : len(_COLUMNS)]]
    for time in cells[len(_COLUMNS) :]:  # not used: times follow from the given costs
        if not isfinite(float(time)):
            raise ValueError(f"{time!r} is not a time")
    kids = [
        Act(_kind(kind), _count(stage), _count(mb), _count(piece), _count(part))
        for kind, stage, mb, piece, part in zip(*fields, strict=True)
    ]
    return _pair(kids)


def _kind(text: str) -> Kind:
    if text not in ELEMENTARY:
        raise ValueError(f"{text!r} is none of {', '.join(ELEMENTARY)}, or two of them with &")
    return Kind(text)


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number of at most nine digits")
    return int(text)


def _torch_acts(cell: str) -> Iterator[Act]:
    """The action of a cell; none if it is empty or a communication that torch added."""
    cell = cell.strip()
    if not cell or _TORCH_ADDED.match(cell):
        return
    both = _TORCH_PAIR.match(cell)
    yield _pair([_torch_act(word) for word in (both.groups() if both else [cell])])


def _torch_act(word: str) -> Act:
    found = _TORCH_ACTION.match(word.strip())
    if not found or found[2] not in _FROM_TORCH or not found[3]:
        raise ValueError(f"{word!r} is not an action")
    return Act(_FROM_TORCH[found[2]], int(found[1]), int(found[3]))


def _pair(kids: Sequence[Act]) -> Act:
    if len(kids) == 1:
        return kids[0]
    if len(kids) > 2:
        raise ValueError(f"{len(kids)} actions at once")
    return pair(*kids)
