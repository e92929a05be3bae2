"""Checks a run's folders and trackers before anything starts. Imports no torch."""

import os
from pathlib import Path
from shlex import quote

from fivefold.config.config import Config
from fivefold.config.megatron import is_megatron
from fivefold.config.records import CheckpointConfig
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes, did_you_mean
from fivefold.hub import model_named
from fivefold.train.folder.run_folder import CHECKPOINTS, RUNS
from fivefold.train.metrics import check_installed


def check_start(config: Config) -> None:
    """Check that the run folder can be written, --load exists, and trackers are installed.

    Raises:
        ConfigError: all mistakes at once.
    """
    mistakes = Mistakes()
    save = config.checkpoint.save
    _check_folder("save", RUNS if save is None else save, "runs/NAME", mistakes)
    if save is not None and not mistakes.found:
        _check_folder("save", save, "runs/NAME", mistakes, within=CHECKPOINTS)
    for name in ("optimizer_offload_path", "param_offload_path"):
        if (away := config.value(name)) is not None:
            _check_folder(name, away, "offloaded", mistakes)
    if config.checkpoint.non_persistent_save_interval:
        name = "non_persistent_local_ckpt_dir"
        _check_folder(name, config.value(name), "/dev/shm", mistakes)
    _check_load(config.checkpoint, mistakes)
    with mistakes.collecting():
        if config.logging.tensorboard:
            check_installed("tensorboard", "TensorBoard")
    with mistakes.collecting():
        if config.logging.wandb_project is not None:
            check_installed("wandb", "W&B")
    mistakes.raise_if_any()


def _check_folder(
    name: str, given: str, example: str, mistakes: Mistakes, within: str = ""
) -> None:
    """Add why a folder that a setting names can neither be written nor created."""
    flag = flag_of(name)
    if not given.strip():
        works = (f"{flag} {example}", f"no {flag}")
        mistakes.add(f"{name} is empty, and must name a folder", works=works)
        return
    try:
        path = Path(given, within)
        there = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
        if not there.is_dir():
            what = "a link to nothing" if there.is_symlink() else "not a folder"
            mistakes.add(f"{name} = {given}: {there} is {what}", attempt=f"another {flag}")
        elif not os.access(there, os.W_OK | os.X_OK):
            mistakes.add(f"{name} = {given}: {there} cannot be written", attempt=f"another {flag}")
    except (OSError, ValueError) as error:  # a name that is too long, or contains a null
        mistakes.add(f"{name} = {given!r} can be no folder: {getattr(error, 'strerror', error)}")


def _check_load(checkpoint: CheckpointConfig, mistakes: Mistakes) -> None:
    load = checkpoint.load
    continues = checkpoint.save is not None and (Path(checkpoint.save) / CHECKPOINTS).is_dir()
    if continues:
        _check_step(checkpoint, mistakes)
    if load is None or continues or model_named(load) or (load.strip() and Path(load).is_dir()):
        return
    if not load.strip():
        mistakes.add("load is empty, and must name a run folder", works=("no --load",))
        return
    path = Path(load)
    near = [p.name for p in path.parent.glob("*") if p.is_dir()]
    meant = did_you_mean(path.name, near)
    mistakes.add(f"there is no checkpoint in {load}: no such folder{meant}")


def _check_step(checkpoint: CheckpointConfig, mistakes: Mistakes) -> None:
    """Add that a run that resumes from its latest checkpoint is asked to load another one."""
    save, load, step = checkpoint.save, checkpoint.load, checkpoint.ckpt_step
    if save is None or load is None or step is None or is_megatron(Path(load)):
        return
    own, other = Path(save).resolve(), Path(f"{Path(save)}-step-{step}")
    if Path(load).resolve() in (own, own / CHECKPOINTS):
        mistakes.add(
            f"ckpt_step {step} has no effect: {save} goes on from its own latest checkpoint",
            "from an earlier one another run starts, in a folder of its own",
            works=(f"--save {quote(str(other))}", "--ckpt-step none"),
        )
