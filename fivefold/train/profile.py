"""Records the timeline of a step for `--profile`; `fivefold schedule` draws it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from fivefold.pipeline.measured import FILE, write_measured
from fivefold.pipeline.recorder import Recorder
from fivefold.train.engine import Engine


@contextmanager
def profiled(engine: Engine, folder: Path) -> Iterator[None]:
    """Record the step in the block, and write the pipelines of `profile_ranks` to the folder.

    The pipeline of the first of these ranks is written to `FILE`, others to that name with the
    number of the rank.
    """
    groups, executor = engine.groups, engine.model.executor
    recorder = Recorder(groups.pp, engine.device)
    executor.observe = recorder
    try:
        yield
    finally:
        executor.observe = nullcontext
    acts = recorder.gather()
    own = engine.layout.grid.group_of(groups.rank, ("pp",))
    if groups.rank != own[0]:
        return
    for place, rank in enumerate(engine.layout.config.logging.profile_ranks):
        if rank in own:
            name = Path(FILE)
            path = folder / (name if place == 0 else f"{name.stem}-{rank}{name.suffix}")
            write_measured(path, acts)
