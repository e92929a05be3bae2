"""What every rank of a run gets, and how it builds its training loop from that."""

import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.local import LocalCheckpoints
from fivefold.data.prepare import PreparedData
from fivefold.data.validation import validation_sets
from fivefold.layout import Layout
from fivefold.train.console import Console
from fivefold.train.engine import Engine
from fivefold.train.evaluation import rank_loader
from fivefold.train.folder.lock import RunLock
from fivefold.train.folder.origin import Origin, restore, samples_counted
from fivefold.train.folder.run_folder import CHECKPOINTS, RunFolder
from fivefold.train.health.stragglers import Stragglers
from fivefold.train.loop import Trainer
from fivefold.train.machine.devices import DeviceChoice
from fivefold.train.machine.numa import Binding
from fivefold.train.machine.threads import Threads
from fivefold.train.ranks.rank_env import RankEnv


@dataclass(frozen=True)
class Job:
    """The settings of a run that every rank gets.

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


def make_trainer(
    job: Job,
    env: RankEnv,
    folder: RunFolder,
    device: torch.device,
    data: PreparedData,
    console: Console | None,
) -> Trainer:
    """The trainer of this rank, restored to the latest step that the run has saved, else to its
    origin.

    Raises:
        CheckpointError: what the run has saved cannot be loaded.
        DataError: the data is not what it was.
    """
    config = job.layout.config
    engine = Engine(job.layout, env.rank, device, initialises=job.origin is None)
    own = Checkpointer(
        folder.path / CHECKPOINTS,
        keep_latest=config.checkpoint.keep_latest_k,
        retain=config.checkpoint.save_retain_interval,
        async_save=config.checkpoint.async_save,
    )
    trainer = Trainer(
        engine,
        rank_loader(job.layout, env.rank, data.train, config.training.batch_sizes),
        validation_sets(config.training, data) if config.training.evaluates else (),
        own,
        console,
        sinks=(),
        audit=folder.audit if config.logging.audit else None,
        profile=folder.path if config.logging.profile else None,
        activity=env.activity,
        stragglers=Stragglers(engine) if config.logging.log_straggler else None,
    )
    trainer.local = open_local(job, folder, trainer)
    engine.model.executor.enter = env.activity.enter
    damage = restore(trainer, job.origin)
    if console is not None:
        if damage:
            console.warning(damage)
        if other := samples_counted(trainer):
            console.note(other)
    return trainer


def open_local(job: Job, folder: RunFolder, trainer: Trainer) -> LocalCheckpoints | None:
    """Open the states in memory, once the run folder has its first start; collective."""
    place = trainer.checkpointer.agree(lambda: local_place(job, folder))
    if place is None:
        return None
    jump = job.layout.config.checkpoint.replication_jump
    return LocalCheckpoints(place, socket.gethostname(), jump)


def local_place(job: Job, folder: RunFolder) -> Path | None:
    """Where the memory of this host keeps states of the run; None: nowhere, or not yet."""
    interval = job.layout.config.checkpoint.non_persistent_save_interval
    return _kept_in_memory(job, folder) if interval else None


def remove_left_states(job: Job, folder: RunFolder) -> None:
    """Free memory of this host that an earlier start of the run used and left, once it has ended
    and saved; nothing may be writing there."""
    if (place := _kept_in_memory(job, folder)) is not None:
        shutil.rmtree(place, ignore_errors=True)


def _kept_in_memory(job: Job, folder: RunFolder) -> Path | None:
    place, identity = job.layout.config.checkpoint.non_persistent_local_ckpt_dir, folder.identity()
    return None if identity is None else Path(place) / "fivefold" / identity
