"""The checkpoint that a run begins with, and whether it may."""

from dataclasses import dataclass
from pathlib import Path

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.errors import ConfigError, Mistake
from fivefold.train.run_folder import CHECKPOINTS
from fivefold.train.saved_state import read_state, same_model


@dataclass(frozen=True)
class Origin:
    """What a run begins with.

    Attributes:
        checkpoints: folder of the checkpoint.
        step: step that is described.
        weights_only: neither optimizer nor place in the data is taken, and steps count from 0.
    """

    checkpoints: Path
    step: int
    weights_only: bool


def find_origin(config: Config, folder: Path) -> Origin | None:
    """The latest checkpoint in a run folder, else the one that --load names, else None.

    For one process alone, which the others ask: what a file system shows differs between machines
    for a moment.

    Raises:
        CheckpointError: no such checkpoint, or one of another model.
        ConfigError: it is beyond the steps that are asked for.
    """
    own, load = Checkpointer(folder / CHECKPOINTS), config.checkpoint.load
    if own.latest() is not None:
        source, step, weights_only = own, None, False
    elif load is None:
        return None
    else:
        source, step = Checkpointer(checkpoints_of(Path(load))), config.checkpoint.ckpt_step
        weights_only = config.checkpoint.finetune
    state = read_state(source, step)
    same_model(state.model, config.model, source.folder)
    origin = Origin(source.folder, state.step, weights_only)
    if not weights_only:
        earlier = [] if source is own else source.steps()
        _check_steps(origin, config.training.train_iters, earlier, continues=source is own)
    return origin


def is_finished(origin: Origin | None, config: Config) -> bool:
    """Whether a run that begins there has no step left to do."""
    if origin is None or origin.weights_only:
        return False
    return origin.step == config.training.train_iters


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints of a run folder, or the path itself."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def _check_steps(origin: Origin, train_iters: int, earlier: list[int], *, continues: bool) -> None:
    """A run goes on from its latest step, or has done all; one that loads has to go further."""
    step = origin.step
    if step < train_iters or (continues and step == train_iters):
        return
    works = [f"--train-iters {2 * step}"]
    if not continues:
        works += [*(f"--ckpt-step {s}" for s in earlier if s < train_iters), "--finetune"]
    whose = "" if continues else "--load "
    what = (
        f"nothing is left to do: {whose}{origin.checkpoints} is at step {step}, and train_iters is "
    )
    attempt = "another --save" if continues else None
    raise ConfigError(Mistake(f"{what}{train_iters}", works=tuple(works), attempt=attempt))
