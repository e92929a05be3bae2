"""Whether and where a run resumes a job of Megatron-LM."""

from pathlib import Path

import torch

from fivefold.checkpoint.index import SavedTensor
from fivefold.checkpoint.matching import check_types
from fivefold.config.config import Config
from fivefold.config.training import TrainingConfig
from fivefold.convert.megatron import MegatronFolder
from fivefold.convert.megatron_training import (
    WEIGHTS_ALONE,
    MegatronTraining,
    keeps_training,
    training_in,
)
from fivefold.data.loader import LoaderState
from fivefold.errors import CheckpointError, Mistake, OtherSettings
from fivefold.optim.adamw import state_name
from fivefold.optim.rounding import MOMENTS
from fivefold.train.folder.saved_state import SavedState
from fivefold.units import several

_NARROW = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def megatron_state(folder: Path, training: TrainingConfig) -> SavedState:
    """Where a run resumes, in the terms of our own checkpoints.

    Raises:
        CheckpointError: the folder does not tell how many steps were taken.
    """
    there = training_in(folder)
    return SavedState(
        step=there.step,
        loader=LoaderState(consumed_samples=_samples(there, training), fingerprint={}),
        model={},
        seq_length=training.seq_length,
        loss_scale=there.loss_scale,
    )


def check_goes_on(folder: Path, config: Config) -> bool:
    """Whether there is training to resume; checks everything except the tensors.

    Raises:
        CheckpointError: there is, and these settings cannot go on from it.
    """
    held = MegatronFolder(folder)
    if not keeps_training(held):
        return False
    if config.model.lora_rank is not None:
        what = f"{folder} is of a run without adapters, and lora_rank asks for some"
        raise CheckpointError(Mistake(what, works=WEIGHTS_ALONE))
    if config.optimizer.optimizer != "adam":
        what = f"{folder} can be resumed only with Adam, and optimizer is "
        what += config.optimizer.optimizer
        raise OtherSettings(Mistake(what, works=("--optimizer adam", *WEIGHTS_ALONE)))
    moments = {m: held.states[m].widest for m in MOMENTS if m in held.states}
    kinds = dict(zip(MOMENTS, config.optimizer.moment_types, strict=True))
    check_types(
        {state_name(m, ""): _NARROW.get(kinds[m], torch.float32) for m in moments},
        {state_name(m, ""): SavedTensor(dtype, (), []) for m, dtype in moments.items()},
    )
    return True


def check_place(folder: Path, training: TrainingConfig) -> str:
    """A note about the place where a run resumes.

    Raises:
        CheckpointError: learning rate and Adam's bias corrections were at different steps, or
            samples had other lengths.
    """
    there = training_in(folder)
    if there.seq_length not in (None, training.seq_length):
        what = f"samples of {folder} have {there.seq_length:,} tokens, and seq_length is "
        what += f"{training.seq_length:,}: its position in the data has no meaning here"
        works = (f"--seq-length {there.seq_length}", *WEIGHTS_ALONE)
        raise CheckpointError(Mistake(what, works=works))
    lost = _iterations_without_step(folder, there, training)
    skipped = f" and {several(lost, 'iteration')} that changed no weight" if lost else ""
    samples = _samples(there, training)
    return (
        f"resumes {folder} with its masters and moments, after {several(there.step, 'step')}"
        f"{skipped} (--finetune: weights alone)\nthe next sample is number {samples + 1:,} of an "
        "order of Fivefold's own: some that were seen there come again"
    )


def _iterations_without_step(
    folder: Path, there: MegatronTraining, training: TrainingConfig
) -> int:
    """Iterations of the job whose gradients overflowed; our steps count only updates."""
    if there.iteration in (None, there.step):
        return 0
    assert there.iteration is not None
    counted = {training.batch_sizes.samples(there.step)}
    if there.batch is not None:
        counted.add(there.step * there.batch)
    if there.iteration > there.step and there.counted_samples in counted:
        return there.iteration - there.step
    what = f"{folder} is of iteration {there.iteration:,}, and Adam has taken "
    what += f"{several(there.step, 'step')}: its moments began later than its learning rate"
    raise CheckpointError(Mistake(what, works=WEIGHTS_ALONE))


def _samples(there: MegatronTraining, training: TrainingConfig) -> int:
    """Samples that the job has consumed; where it does not tell, or restarted its count, as many as
    its steps have here."""
    if there.samples is None or there.samples < there.step:
        return training.batch_sizes.samples(there.step)
    return there.samples
