"""Reads torch's traces of profiled ranks: time, messages, and one joint trace."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from fivefold.errors import DataError, Mistake
from fivefold.files import read_json
from fivefold.train.folder.run_folder import RunFolder

_MESSAGE = re.compile(r"(?P<axis>[\w ]+): (?P<op>\w+), (?P<bytes>\d{1,18}) B sent")
_ACT = re.compile(r"(?P<kind>[A-Z]+)(?: of stage \d+.*)?")
_NAME = re.compile(r"rank-(\d+)\.json")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LATEST = 1e18  # microseconds: no clock is beyond it
Event = Mapping[str, Any]


@dataclass
class RankTrace:
    """What a trace of one rank says.

    Attributes:
        rank: the rank.
        events: the trace's events.
        seconds: time from the first event to the end of the last.
        acts: seconds on the host in pipeline actions, by kind; F&B: in overlapped pairs.
        messages: number and bytes sent, by axis and operation.
        operations: seconds of each operation itself, without those inside it: of GPUs their
            kernels, else on the host.
    """

    rank: int
    events: list[dict[str, Any]]
    seconds: float = 0.0
    acts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def read_traces(folder: Path) -> list[RankTrace]:
    """The traces in a run folder, by rank.

    Raises:
        DataError: there is none, or one is damaged.
    """
    found = {
        int(match[1]): path
        for path in RunFolder(folder).profile.glob("rank-*.json")
        if (match := _NAME.fullmatch(path.name))
    }
    if not found:
        what = f"{folder} holds no trace of torch's profiler"
        again = "fivefold train ... --profile --use-pytorch-profiler"
        raise DataError(Mistake(what, attempt=again))
    return [_summed(rank, _events(path)) for rank, path in sorted(found.items())]


def merged(traces: Iterable[RankTrace]) -> dict[str, Any]:
    """One trace of all ranks, in which each is a process of its own.

    Clocks are those of the machines: ranks of several are as far apart as their clocks.
    """
    events: list[dict[str, Any]] = []
    for trace in traces:
        name = {"name": f"rank {trace.rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": trace.rank, "args": name})
        for event in trace.events:
            if event.get("ph") != "M":
                events.append({**event, "pid": trace.rank, "tid": _row(event)})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(path: Path) -> list[dict[str, Any]]:
    content = read_json(path, dict[str, Any], DataError)
    events = content.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise DataError(f"{path} is no trace: it has no list of events")
    return events


def _row(event: Event) -> str:
    """Threads of the host and streams of the GPU, to which torch gives separate processes."""
    on_gpu = event.get("cat") in _KERNELS
    return f"stream {event.get('tid')}" if on_gpu else f"thread {event.get('tid')}"


def _summed(rank: int, events: list[dict[str, Any]]) -> RankTrace:
    trace = RankTrace(rank, events)
    spans = [event for event in events if _is_span(event)]
    if not spans:
        return trace
    begin = min(event["ts"] for event in spans)
    trace.seconds = max(event["ts"] + event["dur"] - begin for event in spans) / 1e6
    for event in spans:
        name = str(event.get("name"))
        if match := _MESSAGE.fullmatch(name):
            key = match["axis"], match["op"]
            count, size = trace.messages.get(key, (0, 0))
            trace.messages[key] = count + 1, size + int(match["bytes"])
        elif event.get("cat") == "user_annotation" and (match := _ACT.fullmatch(name)):
            kind = "F&B" if "&" in name else match["kind"]
            trace.acts[kind] += event["dur"] / 1e6
    kernels = [event for event in spans if event.get("cat") in _KERNELS]
    if kernels:
        for event in kernels:
            trace.operations[str(event.get("name"))] += event["dur"] / 1e6
    else:
        for name, seconds in _own(e for e in spans if e.get("cat") == "cpu_op"):
            trace.operations[name] += seconds
    return trace


def _is_span(event: Event) -> bool:
    at, lasts = event.get("ts"), event.get("dur")
    return event.get("ph") == "X" and _is_time(at) and _is_time(lasts) and lasts >= 0


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < LATEST


def _own(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Seconds of each operation without those of the operations that it calls."""
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.get("tid")].append(event)
    for rows in threads.values():
        open_: list[tuple[float, str]] = []  # end and name of what is running, the innermost last
        for event in sorted(rows, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and open_[-1][0] <= event["ts"]:
                open_.pop()
            if open_:
                yield open_[-1][1], -event["dur"] / 1e6
            yield str(event.get("name")), event["dur"] / 1e6
            open_.append((event["ts"] + event["dur"], str(event.get("name"))))


def longest(operations: Mapping[str, float], count: int) -> Sequence[tuple[str, float]]:
    """The operations that took the longest, with their seconds."""
    return sorted(operations.items(), key=lambda item: -item[1])[:count]
