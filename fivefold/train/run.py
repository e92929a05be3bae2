"""Runs a checked layout: data, processes, run folder, training loop."""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.checkpoint.folder import CheckpointFolder
from fivefold.checkpoint.local import latest_complete
from fivefold.config.config import Config
from fivefold.config.sources import to_toml
from fivefold.counts.derived import describe
from fivefold.data.prepare import PreparedData, Progress
from fivefold.errors import FivefoldError, Mistake, TrainingError
from fivefold.files import telling_system_errors
from fivefold.layout import Layout
from fivefold.mesh.collectives import from_first
from fivefold.train.build import (
    Job,
    local_place,
    make_trainer,
    open_local,
    remove_left_states,
)
from fivefold.train.console import Console
from fivefold.train.corpora import open_data
from fivefold.train.folder.lock import FolderInUse, RunLock, claim
from fivefold.train.folder.origin import Origin, find_origin, is_finished
from fivefold.train.folder.run_folder import CHECKPOINTS, RunFolder, new_run_path
from fivefold.train.folder.side_files import keep_side_files
from fivefold.train.health.stack_sampler import mark_work
from fivefold.train.health.watchdog import Watchdog
from fivefold.train.loop import Trainer
from fivefold.train.machine.cuda_environment import keep_flight_record
from fivefold.train.machine.devices import (
    Asked,
    lacks_units,
)
from fivefold.train.machine.numa import described, prefer_memory
from fivefold.train.meters import device_peak
from fivefold.train.metrics import close_all
from fivefold.train.places import choose_places, join_group
from fivefold.train.ranks.hosts import (
    check_alike,
    check_seen,
    crossing,
    gather_hosts,
    given_data,
    given_settings,
)
from fivefold.train.ranks.launch import End, place_name, run_ranks
from fivefold.train.ranks.rank_env import RankEnv, read_rank_env
from fivefold.train.ranks.rejoin import Orders, keep_on
from fivefold.train.ranks.restarts import NextStart, Restart, Restarts, restarting
from fivefold.train.ranks.started import run_started
from fivefold.train.sinks import open_sinks
from fivefold.units import several


def train(
    layout: Layout, name: str, nproc: int | None, asked: Asked = "auto", *, max_restarts: int = 0
) -> End:
    """Run a recipe and return how it ended.

    Args:
        layout: layout for the number of ranks.
        name: name of the recipe.
        nproc: number of processes to start; None if torchrun or srun has started them, or there is
            only this process.
        asked: kind of device to train on.
        max_restarts: times to start ranks of this command again after a failure.
    """
    env, config = read_rank_env(), layout.config
    if env.launcher != "single":
        save = config.checkpoint.save
        status = run_started(
            lambda env: _train_as_launched(layout, name, env, asked),
            env,
            describe=layout.grid.name,
            errors_folder=None if save is None else RunFolder(Path(save)).errors,
        )
        return End(status)
    chosen, threads, bindings = choose_places(layout, env, nproc, asked)
    with _claim(config, name) as lock:
        origin = _find_origin(config, lock, again=False)
        job = Job(layout, name, lock.folder, origin, chosen, threads, bindings, lock)
        if is_finished(job.origin, config):
            _tell_finished(job, lock)
            return End(0)
        with lock.beating():
            job = replace(job, data=_open_data(job, print))
        if nproc in (None, 1) and not max_restarts:
            torch.set_num_threads(threads.count)
            device = _join(job, env)
            try:
                return End(run_rank(job, env, device))
            finally:
                dist.destroy_process_group()

        find = partial(_find_origin, config, lock, again=True)
        return _train_here(job, nproc or 1, max_restarts, find)


def _train_here(
    job: Job, nproc: int, max_restarts: int, find_origin: Callable[[], Origin | None]
) -> End:
    """Train on ranks that this process starts, and starts again after failures."""
    folder, layout = RunFolder(job.path), job.layout

    def kept() -> int | None:
        place = local_place(job, folder)
        return None if place is None else latest_complete(place, nproc)

    following = NextStart(Restarts(max_restarts, kept), find_origin, folder, layout.config)
    started = partial(
        run_ranks,
        nproc=nproc,
        describe=layout.grid.name,
        errors_folder=folder.errors,
        threads=job.threads.count,
    )
    if layout.config.checkpoint.non_persistent_save_interval and max_restarts:

        def revive(end: End) -> tuple[Orders | None, str]:
            again, message = following(end)
            return (None if again is None else again.orders), message

        end = started(partial(keep_on, partial(_run_ordered, job)), revive=revive)
        return End(0) if following.finished else end

    def ranks(origin: Origin | None, after: str) -> End:
        return started(partial(_join_and_run, replace(job, origin=origin, after=after)))

    return restarting(ranks, job.origin, following)


def _run_ordered(job: Job, env: RankEnv, orders: Orders | None) -> int:
    """Train on this rank from the state that `orders` names, else from the job's."""
    if orders is not None:
        job = replace(job, **Restart.of(orders)._asdict())
    return _join_and_run(job, env)


def _join_and_run(job: Job, env: RankEnv) -> int:
    return run_rank(job, env, _join(job, env))


def _train_as_launched(layout: Layout, name: str, env: RankEnv, asked: Asked) -> int:
    """Train on a rank that torchrun or srun started; the first rank locks the run folder."""
    config, lock = layout.config, None
    outcome: tuple[Path, Origin | None] | FivefoldError | None = None
    chosen, threads, bindings = choose_places(layout, env, None, asked)
    torch.set_num_threads(threads.count)
    with ExitStack() as stack:
        if env.rank == 0:
            try:
                lock = stack.enter_context(_claim(config, name))
                outcome = (lock.folder, _find_origin(config, lock, again=env.restarted))
            except FivefoldError as error:
                outcome = error
        device = join_group(config, env, chosen, bindings)
        hosts = gather_hosts()
        check_alike(given_settings(config), hosts)
        outcome_of_first = from_first(outcome, dist.group.WORLD)
        if isinstance(outcome_of_first, FivefoldError):
            raise outcome_of_first
        assert outcome_of_first is not None
        path, origin = outcome_of_first
        check_seen(path, hosts)
        job = Job(layout, name, path, origin, chosen, threads, bindings, lock, hosts=hosts)
        if not is_finished(origin, config):
            run_rank(job, env, device)
        elif lock is not None:
            _tell_finished(job, lock)
    return 0


def run_rank(job: Job, env: RankEnv, device: torch.device) -> int:
    """Train on this rank, which has joined the process group, to the end of the run.

    The run folder does not change before every rank has passed every check.
    """
    lock = job.lock if env.rank == 0 else None
    folder = RunFolder(job.path)
    if device.type == "cuda":
        keep_flight_record(job.path)
        env.activity.mark = mark_work
    with ExitStack() as stack:
        stack.enter_context(telling_system_errors(TrainingError, job.path))
        if lock is not None:
            stack.enter_context(lock.beating())
        data = job.data or _open_data(job, print if lock else logging.debug)
        if job.hosts:
            check_alike(given_data(data), job.hosts)
        stack.enter_context(_watchdog(job, env, folder))
        console = _open_console(job, device) if env.rank == 0 else None
        trainer = make_trainer(job, env, folder, device, data, console)
        try:
            dist.barrier()
            if lock is not None and console is not None:
                _begin(job, folder, lock, trainer, data, console)
            trainer.local = trainer.local or open_local(job, folder, trainer)
            trainer.run()
            if trainer.local is None and env.local_rank == 0:
                remove_left_states(job, folder)
        except (FivefoldError, OSError):
            if lock is not None:
                lock.check()  # raises the cause if the run folder has vanished
            raise
        finally:
            trainer.loader.close()
            trainer.engine.graphs.release()
            if console is not None:
                close_all((console, *trainer.sinks))
        if console is not None:
            console.note(f"everything is in {folder.path}")
    return 0


def _watchdog(job: Job, env: RankEnv, folder: RunFolder) -> Watchdog:
    training = job.layout.config.training
    return Watchdog(
        env,
        training.watchdog_timeout_seconds,
        name=partial(place_name, describe=job.layout.grid.name),
        ends=f"--distributed-timeout-minutes {training.distributed_timeout_minutes:g}",
        folder=folder.hangs,
    )


def _join(job: Job, env: RankEnv) -> torch.device:
    return join_group(job.layout.config, env, job.device, job.bindings)


def _claim(config: Config, name: str) -> RunLock:
    """Lock the run folder of --save, or a new one."""
    save = config.checkpoint.save
    if save is not None:
        path = Path(save)
        return claim(path.resolve() if path.is_symlink() else path)
    while True:
        path = new_run_path(name)
        try:
            lock = claim(path)
        except FolderInUse:  # by a run of this recipe that started in the same second
            continue
        if path in lock.made:
            return lock
        lock.release()


def _find_origin(config: Config, lock: RunLock, *, again: bool) -> Origin | None:
    """The checkpoint to start from, once the files of the run folder have been checked.

    Args:
        again: whether ranks start again by themselves, so that nobody is there to set a damaged
            file aside.
    """
    folder = RunFolder(lock.folder)
    if again:
        lock.check()
        if damage := folder.set_aside_damaged_starts():
            print(f"warning: {damage}", file=sys.stderr, flush=True)
    folder.starts()
    return find_origin(config, lock.folder)


def _open_data(job: Job, progress: Progress) -> PreparedData:
    known = None if job.origin is None else job.origin.tokenizer
    return open_data(job.layout.config, progress, known)


def _tell_finished(job: Job, lock: RunLock) -> None:
    """Say that nothing is left to do, and remove what a start that was killed as it ended left."""
    folder, training = RunFolder(job.path), job.layout.config.training
    if (kept := folder.path / CHECKPOINTS).is_dir():  # else another run's steps are done
        lock.begin()  # else it would leave the file of a dead owner as it was
        CheckpointFolder(kept).clear()
    remove_left_states(job, folder)
    steps = training.num_steps
    what = f"{job.path} has done its {several(steps, 'step')}: nothing is left to do"
    further = f"{training.lasting(2 * steps)} to go on, or another --save to train anew"
    print(Mistake(what, attempt=further))


def _begin(
    job: Job,
    folder: RunFolder,
    lock: RunLock,
    trainer: Trainer,
    data: PreparedData,
    console: Console,
) -> None:
    """Write settings, environment and tokenizer to the run folder; on the first rank."""
    device = trainer.engine.device
    lock.begin()
    settings = to_toml(job.layout.config)
    folder.open(
        settings,
        [torch.cuda.get_device_name(device)] if device.type == "cuda" else [],
        job.after,
        trainer.step,
    )
    if job.layout.config.logging.audit:
        folder.expect_audit(settings)
    data.tokenizer.save(folder.tokenizer)
    if job.origin is not None and (beside := job.origin.beside) is not None:
        keep_side_files(beside, folder.path)
    trainer.check_folder = lock.check
    trainer.sinks = open_sinks(job.layout.config, folder, trainer.step, trainer.skipped, console)
    if (across := crossing(job.layout, job.hosts)) is not None:
        console.warning(across)
    if job.origin is not None and job.origin.left_out:
        console.note(f"left out of {job.origin.checkpoints}: {job.origin.left_out}")
    if job.origin is not None and job.origin.note:
        console.note(job.origin.note)
    console.note(f"run folder: {folder.path}")
    if trainer.step:
        console.note(f"continues after step {trainer.step}")


def _open_console(job: Job, device: torch.device) -> Console:
    config = job.layout.config
    console = Console(
        config.training.num_steps,
        device="gpu" if device.type == "cuda" else "rank",
        peak_known=device_peak(device, config.training.precision) is not None,
        experts=config.model.num_experts is not None,
        log_interval=config.logging.log_interval,
    )
    threads = ("threads a rank", f"{job.threads.count}", job.threads.why)
    kind = ("device", "GPU" if job.device.kind == "cuda" else "CPU", job.device.why)
    rows = [*describe(job.layout), kind, threads]
    if job.bindings:
        mode = job.layout.config.training.numa_binding
        memory = prefer_memory(job.bindings[0].node)  # already applied on this rank
        rows.append(("NUMA binding", f"{mode}", f"{described(job.bindings)}; {memory}"))
    console.banner(f"fivefold train {job.name}", rows)
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if warning := lacks_units(config.training.precision, found):
            console.warning(warning)
    return console
