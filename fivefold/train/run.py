"""From a checked layout to a finished run: data, processes, run folder, loop."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.check import Layout
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.sources import to_toml
from fivefold.data.loader import Loader
from fivefold.data.prepare import PreparedData
from fivefold.derived import describe
from fivefold.train.console import Console
from fivefold.train.corpora import open_data
from fivefold.train.engine import Engine
from fivefold.train.launch import init_process_group, launch_local
from fivefold.train.loop import Trainer, device_peak
from fivefold.train.metrics import Sink, TensorBoard, WeightsAndBiases, close_all
from fivefold.train.rank_env import RankEnv, read_rank_env
from fivefold.train.run_folder import MetricsFile, RunFolder, new_run_path

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Job:
    """What every rank of a run is told.

    Attributes:
        layout: the checked configuration.
        name: of the recipe, for the run folder.
        path: of the run folder; None if the first rank is still to choose it.
        data: tokenised already, or None where each rank opens it itself.
    """

    layout: Layout
    name: str
    path: Path | None
    data: PreparedData | None


def train(layout: Layout, name: str, nproc: int | None) -> int:
    """Run a recipe and return the exit status.

    Args:
        layout: for as many ranks as there will be.
        name: of the recipe.
        nproc: processes to start here; None if torchrun or srun has started them (or there is
            just this one).
    """
    if nproc is None or nproc == 1:
        env = RankEnv() if nproc == 1 else read_rank_env()
        return run_rank(Job(layout, name, _given_path(layout), None), env)
    data = open_data(layout.config, print)
    job = Job(layout, name, _given_path(layout) or new_run_path(name), data)
    assert job.path is not None
    return launch_local(
        lambda env: run_rank(job, env),
        nproc,
        describe=layout.grid.name,
        errors_folder=RunFolder(job.path).errors,
    )


def run_rank(job: Job, env: RankEnv) -> int:
    """Train on this rank to the end of the run."""
    config = job.layout.config
    device = init_process_group(
        env,
        "cuda" if torch.cuda.device_count() else "cpu",
        timeout_seconds=60 * config.training.distributed_timeout_minutes,
    )
    try:
        data = job.data or open_data(config, print if env.rank == 0 else logging.debug)
        folder = RunFolder(_agree_on_path(job))
        console = _open_console(job, env, folder, device) if env.rank == 0 else None
        trainer = _make_trainer(job, env, folder, device, data, console)
        try:
            if console is not None and trainer.step:
                console.note(f"continues after step {trainer.step}")
            trainer.run()
        finally:
            trainer.loader.close()
            if console is not None:
                close_all((console, *trainer.sinks))
        if console is not None:
            console.note(f"everything is in {folder.path}")
    finally:
        dist.destroy_process_group()
    return 0


def _make_trainer(
    job: Job,
    env: RankEnv,
    folder: RunFolder,
    device: torch.device,
    data: PreparedData,
    console: Console | None,
) -> Trainer:
    config = job.layout.config
    engine = Engine(job.layout, env.rank, device)
    own = Checkpointer(
        folder.path / CHECKPOINTS,
        keep_latest=config.checkpoint.keep_latest_k,
        async_save=config.checkpoint.async_save,
    )
    validation = None
    if config.training.eval_interval:
        validation = _loader(job.layout, env, data, validation=True)
    trainer = Trainer(
        engine,
        _loader(job.layout, env, data),
        validation,
        own,
        console,
        sinks=(),
        audit=folder.audit if config.logging.audit else None,
        profile=folder.path if config.logging.profile else None,
    )
    load = config.checkpoint.load
    if own.latest() is not None:
        trainer.restore(own, None, weights_only=False)
    elif load is not None:
        source = Checkpointer(checkpoints_of(Path(load)))
        trainer.restore(
            source, config.checkpoint.ckpt_step, weights_only=config.checkpoint.finetune
        )
    if env.rank == 0:
        data.tokenizer.save(folder.path / TOKENIZER)
        trainer.sinks = _open_sinks(job, folder, trainer.step)
    return trainer


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints of a run folder, or the path itself."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def _loader(
    layout: Layout, env: RankEnv, data: PreparedData, *, validation: bool = False
) -> Loader:
    training = layout.config.training
    return Loader(
        data.valid if validation else data.train,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        dp_rank=layout.grid.dp_rank(env.rank),
        dp_size=layout.grid.dp,
        prefetch=not validation,
    )


def _given_path(layout: Layout) -> Path | None:
    save = layout.config.checkpoint.save
    return None if save is None else Path(save)


def _agree_on_path(job: Job) -> Path:
    """The run folder, of which the first rank's clock and file system decide."""
    if job.path is not None:
        return job.path
    chosen = [str(new_run_path(job.name)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen, src=0)
    assert chosen[0] is not None
    return Path(chosen[0])


def _open_console(job: Job, env: RankEnv, folder: RunFolder, device: torch.device) -> Console:
    config = job.layout.config
    names = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    folder.open(to_toml(config), names)
    console = Console(
        config.training.train_iters,
        device="gpu" if device.type == "cuda" else "rank",
        peak_known=device_peak(device, config.training.precision) is not None,
        log_interval=config.logging.log_interval,
    )
    console.banner(f"fivefold train {job.name}", describe(job.layout))
    console.note(f"run folder: {folder.path}")
    return console


def _open_sinks(job: Job, folder: RunFolder, step: int) -> list[Sink]:
    logging_ = job.layout.config.logging
    sinks: list[Sink] = [MetricsFile(folder.metrics_file, after_step=step)]
    if logging_.tensorboard:
        sinks.append(TensorBoard(folder.path / "tensorboard"))
    if logging_.wandb_project:
        values = {name: asdict(section) for name, section in job.layout.config.sections()}
        sinks.append(
            WeightsAndBiases(
                logging_.wandb_project, folder.path.name, values, folder.path, resume=step > 0
            )
        )
    return sinks
