"""The information that every rank of a run gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.data.prepare import PreparedData
from fivefold.layout import Layout
from fivefold.train.folder.lock import RunLock
from fivefold.train.folder.origin import Origin
from fivefold.train.machine.devices import DeviceChoice
from fivefold.train.machine.numa import Binding
from fivefold.train.machine.threads import Threads


@dataclass(frozen=True)
class Job:
    """The information that every rank of a run gets.

    Attributes:
        layout: the checked layout.
        name: name of the recipe.
        path: path of the run folder.
        origin: checkpoint to start from; None: new weights.
        lock: lock of the run folder; None on ranks that write only checkpoints there.
        data: the tokenised corpora; None if each rank opens them itself.
        device: kind of device of every rank.
        threads: number of CPU threads of each rank.
        bindings: processors of each rank on this machine; empty if ranks are not bound.
        hosts: host of every rank that a launcher has started; empty if this command started them.
        after: the failure after which the ranks were started again; empty at the first start.
    """

    layout: Layout
    name: str
    path: Path
    origin: Origin | None
    device: DeviceChoice
    threads: Threads
    bindings: Sequence[Binding] = ()
    lock: RunLock | None = None
    data: PreparedData | None = None
    hosts: Sequence[str] = ()
    after: str = ""
