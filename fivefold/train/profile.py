"""Records steps for `--profile`: the timeline of the pipeline, torch's trace, the allocator."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fivefold.audit.calls import call_of, is_call
from fivefold.audit.traffic import axes_of
from fivefold.audit.watch import Watch
from fivefold.config.records import LoggingConfig
from fivefold.config.sources import to_toml
from fivefold.errors import ConfigError, Mistake, TrainingError
from fivefold.files import atomic_path, write_atomic
from fivefold.pipeline.costs.measured import FILE, write_measured
from fivefold.pipeline.ir import Act
from fivefold.pipeline.run.recorder import Recorder
from fivefold.train.engine import Engine
from fivefold.train.folder.run_folder import RunFolder

MOST_ALLOCATIONS = 1_000_000  # that the allocator's history holds


@contextmanager
def profiled(engine: Engine, folder: Path) -> Iterator[None]:
    """Record the step in the block, and write what `profile_ranks` did to the run folder.

    The pipeline of the first of these ranks is written to `FILE`, others to that name with the
    number of the rank; traces of each of them to the folder `profile`, with the settings of this
    start, since later ones may have another layout.
    """
    groups, executor = engine.groups, engine.model.executor
    logging = engine.layout.config.logging
    recorder = Recorder(groups.pp, engine.device)
    own, there = groups.rank in logging.profile_ranks, RunFolder(folder).profile
    if logging.use_pytorch_profiler:
        _forget(there, groups.rank, logging.profile_ranks)
    with ExitStack() as stack:
        stack.enter_context(engine.graphs.eagerly())
        if own and logging.use_pytorch_profiler:
            stack.enter_context(_traced(engine, there / f"rank-{groups.rank}.json"))
            executor.observe = lambda act: _both(recorder, act)
        else:
            executor.observe = recorder
        if own and logging.record_memory_history:
            stack.enter_context(_allocations(there / f"memory-{groups.rank}.pickle"))
        try:
            yield
        finally:
            executor.observe = nullcontext
    acts = recorder.gather()
    pipeline = engine.layout.grid.group_of(groups.rank, ("pp",))
    if groups.rank != pipeline[0]:
        return
    for place, rank in enumerate(logging.profile_ranks):
        if rank in pipeline:
            name = Path(FILE)
            path = folder / (name if place == 0 else f"{name.stem}-{rank}{name.suffix}")
            write_measured(path, acts)
            if place == 0:
                there.mkdir(parents=True, exist_ok=True)
                write_atomic(RunFolder(there).config_file, to_toml(engine.layout.config))


def _forget(folder: Path, rank: int, profiled_ranks: Collection[int]) -> None:
    """Remove this rank's trace, and on the first rank those of ranks that write none.

    An earlier start may have left them for other ranks; they do not show this step.
    """
    for path in folder.glob("rank-*.json"):
        other = path.stem.removeprefix("rank-") not in map(str, profiled_ranks)
        if path.stem == f"rank-{rank}" or (rank == 0 and other):
            path.unlink(missing_ok=True)


def check_profiler(logging: LoggingConfig, device: str) -> None:
    """Check the profiler settings that depend on the device.

    Raises:
        ConfigError: the allocator of this device keeps no history.
    """
    if logging.record_memory_history and device != "cuda":
        what = "record_memory_history needs a GPU's allocator, and ranks train on the CPU"
        raise ConfigError(Mistake(what, works=("--no-record-memory-history",)))


@contextmanager
def _both(recorder: Recorder, act: Act) -> Iterator[None]:
    with recorder(act), record_function(str(act)):
        yield


@contextmanager
def _traced(engine: Engine, path: Path) -> Iterator[None]:
    """Write torch's trace of the block, with messages named by axis.

    Messages of compiled layers have no names: an observer of operations would run these uncompiled.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines between ours
    activities = [ProfilerActivity.CPU]
    if engine.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    compiled = engine.layout.config.training.compile
    named = nullcontext() if compiled else _Named(axes_of(engine.groups))
    # Without `acc_events`, for which PyTorch makes objects of all events that nobody reads.
    with profile(activities=activities) as trace, named:
        yield
    with atomic_path(path) as temporary:
        trace.export_chrome_trace(str(temporary))
        if not _is_whole(temporary):  # on a full disk, it writes what it can and says nothing
            raise TrainingError(f"torch's profiler could not write {path}: is the disk full?")


def _is_whole(trace: Path) -> bool:
    """Whether the JSON of a trace is complete."""
    with suppress(OSError), trace.open("rb") as file:
        file.seek(-2, os.SEEK_END)
        return file.read().rstrip().endswith(b"}")
    return False


@contextmanager
def _allocations(path: Path) -> Iterator[None]:
    """Write the history of the GPU's allocator in the block."""
    torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    try:
        yield
        with atomic_path(path) as temporary:
            torch.cuda.memory._dump_snapshot(str(temporary))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class _Named(Watch):
    """Marks each operation of torch.distributed with a range: axis, operation, bytes sent."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes

    def _observes(self, func: Any) -> bool:
        return is_call(func)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = call_of(func, args)
        named: AbstractContextManager[Any] = nullcontext()
        if call is not None:
            axis = self._axes.get(call.group.group_name, call.group.group_name)
            named = record_function(f"{axis}: {call.op}, {call.sent:.0f} B sent")
        with named:
            return super()._run(func, args, kwargs)
