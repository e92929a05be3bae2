"""Finds and checks the checkpoint that a run starts from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config, refuse_adapter
from fivefold.config.huggingface.comparing import differences
from fivefold.config.megatron import is_megatron, megatron_checkpoint
from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.convert.hub import HubFolder, is_hub_folder
from fivefold.convert.load import checked_sources, model_in
from fivefold.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    DataError,
    Mistake,
    OtherSettings,
)
from fivefold.mesh.slices import Piece
from fivefold.train.corpora import trains_tokenizer
from fivefold.train.folder.megatron_state import check_goes_on, check_place, megatron_state
from fivefold.train.folder.run_folder import CHECKPOINTS, TOKENIZER
from fivefold.train.folder.run_tokenizer import known_tokenizer
from fivefold.train.folder.saved_state import read_state, same_model, without_adapters
from fivefold.train.folder.side_files import SIDE
from fivefold.train.folder.upcycled import (
    naming_needed_size,
    of_dense,
    start_from_dense,
    upcycling_note,
)
from fivefold.train.health.not_finite import fill_finite
from fivefold.train.loop import Trainer
from fivefold.units import several


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run starts from.

    Attributes:
        checkpoints: folder that holds the checkpoint.
        step: step of the checkpoint.
        weights_only: whether only weights are loaded, and steps count from 0 again.
        foreign: whether it is a folder as Hugging Face or Megatron-core keeps them.
        adapter: folder of an adapter that PEFT saved, beside these; None: there is none.
        damage: why a later checkpoint of the run was passed over; empty if none was.
        left_out: parts of a multimodal model there that are not read; empty if all is.
        note: what the user is to know of how the run goes on from there; empty if nothing.
        tokenizer: file of the tokenizer whose tokens its weights know; None: none is known.
        dense: whether it is of a dense model, of whose MLPs experts are made.
    """

    checkpoints: Path
    step: int
    weights_only: bool
    foreign: bool = False
    adapter: Path | None = None
    damage: str = ""
    left_out: str = ""
    note: str = ""
    tokenizer: Path | None = None
    dense: bool = False

    @property
    def beside(self) -> Path | None:
        """The folder with the files that lay beside its weights on the hub, if there is one."""
        kept = self.checkpoints if self.foreign else self.checkpoints.parent / SIDE
        return kept if kept.is_dir() else None


def find_origin(config: Config, folder: Path) -> Origin | None:
    """The latest intact checkpoint in a run folder, else the one that --load names, else None.

    Of the files of a run's own checkpoint only the state is read: damage to others is noticed by
    `restore`.

    Call it in one process only and pass on the result: file systems may briefly show different
    machines different contents.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model.
        ConfigError: the checkpoint is beyond the steps that the run asks for.
    """
    own, load = Checkpointer(folder / CHECKPOINTS), config.checkpoint.load
    if own.latest() is not None:
        return _from_run(own, folder, config, continues=True)
    if load is None:
        return None
    if not config.checkpoint.moe_use_upcycling:
        return _loaded(load, folder, config)
    with naming_needed_size(config):
        found = _loaded(load, folder, of_dense(config))
    note = "\n".join(filter(None, (found.note, upcycling_note(config, Path(load)))))
    return replace(found, dense=True, note=note)


def _loaded(load: str, folder: Path, config: Config) -> Origin:
    """The checkpoint that --load names, which is not the run's own."""
    if (foreign := _foreign(load, config)) is not None:
        return foreign
    source = Checkpointer(checkpoints_of(Path(load)))
    return _from_run(source, folder, config, continues=False)


def _foreign(load: str, config: Config) -> Origin | None:
    """The Hugging Face or Megatron-core checkpoint in a folder; None if it is neither."""
    folder, adapter = Path(load), config.checkpoint.load_adapter
    if adapter != load:
        refuse_adapter(folder)
    if is_hub_folder(folder):
        if config.checkpoint.ckpt_step is not None:
            what = f"ckpt_step chooses one of several checkpoints, and {load} has weights alone"
            raise CheckpointError(Mistake(what, works=("--ckpt-step none",)))
        return _from_hub(folder, config)
    if adapter is not None:
        what = f"load_adapter is for weights as Hugging Face keeps them, and {load} has none"
        run, weights = quote(load), quote(f"{folder}-hf")
        made = f"--load {weights}, made by fivefold convert {run} {weights}"
        raise CheckpointError(Mistake(what, attempt=made))
    if not is_megatron(folder):
        return None
    return _from_megatron(megatron_checkpoint(folder, config.checkpoint.ckpt_step), config)


def _from_run(source: Checkpointer, folder: Path, config: Config, *, continues: bool) -> Origin:
    """A checkpoint of a run: of the run in this folder if it `continues`, else of another one."""
    damage = ""
    try:
        state = read_state(source, None if continues else config.checkpoint.ckpt_step)
    except DamagedCheckpoint as error:
        if not continues or error.intact is None:
            raise
        state, damage = read_state(source, error.intact), error.passed_over
    weights_only = config.checkpoint.finetune and not continues
    weights_only |= not state.loader["fingerprint"]  # converted weights, which nothing trained yet
    starts = without_adapters(state, config.model)
    if starts and not weights_only:
        what = f"{source.folder} is of a run without adapters, and lora_rank asks for some"
        afresh = f"--load {quote(str(folder))} --finetune --save {quote(f'{folder}-adapters')}"
        works = (afresh if continues else "--finetune",)
        raise CheckpointError(Mistake(what, works=works))
    model = config.model.base if starts else config.model
    same_model(state.model, model, source.folder, by_flags=True)
    load = config.checkpoint.load
    named = (Path(load), Path(load).parent) if continues and load is not None else ()
    tokenizer = known_tokenizer((source.folder.parent, *named), state)
    note = "" if continues else _tokenizer_note(tokenizer, config)
    origin = Origin(
        source.folder, state.step, weights_only, damage=damage, note=note, tokenizer=tokenizer
    )
    if not weights_only:
        earlier = [] if continues else source.steps()
        _check_steps(origin, config.training, earlier, continues=continues)
    return origin


def _from_megatron(folder: Path, config: Config) -> Origin:
    """A checkpoint of Megatron-LM: the run resumes with its moments, or takes only the weights.

    Raises:
        CheckpointError: it is of another model, lacks tensors, or cannot be gone on from.
        ConfigError: it is beyond the steps that the run asks for.
    """
    weights_only = config.checkpoint.finetune
    trained = not weights_only and check_goes_on(folder, config)
    checked_sources(folder, config.model, trained=trained)  # before any rank starts
    if not trained:
        note = "" if weights_only else f"{folder} has weights alone: steps count from 0"
        return Origin(folder, 0, weights_only=True, foreign=True, note=note)
    step, note = megatron_state(folder, config.training).step, check_place(folder, config.training)
    origin = Origin(folder, step, weights_only=False, foreign=True, note=note)
    _check_steps(origin, config.training, [], continues=False)
    return origin


def _from_hub(folder: Path, config: Config) -> Origin:
    """The weights in a Hugging Face folder, which has no steps and no optimizer state.

    Raises:
        CheckpointError: they are of another model, or their files lack tensors.
        ConfigError: its config.json is not supported.
    """
    hub = HubFolder(folder)
    there = model_in(hub)
    if wrong := differences(config.model.base, there):
        what, attempt = f"{folder} is of another model", f"--model {quote(str(folder))}"
        if there != from_hf_config(hub.fields):  # the files lack tensors that config.json promises
            attempt += f" --mtp-num-layers {there.mtp_num_layers}"
        raise CheckpointError(Mistake(what, tuple(wrong), attempt=attempt))
    load = config.checkpoint.load_adapter
    adapter = None if load is None else Path(load)
    checked_sources(folder, config.model, adapter)  # before any rank starts
    file = folder / TOKENIZER
    tokenizer = file if file.is_file() else None
    return Origin(
        folder,
        0,
        weights_only=True,
        foreign=True,
        adapter=adapter,
        left_out=hub.parts_left_out(),
        note=_tokenizer_note(tokenizer, config),
        tokenizer=tokenizer,
    )


def _tokenizer_note(tokenizer: Path | None, config: Config) -> str:
    """The note that text is tokenised with the tokenizer of the weights, where no setting names
    another."""
    used = tokenizer is not None and trains_tokenizer(config.data)
    return f"text is tokenised by {tokenizer}, which came with the weights" if used else ""


def restore(trainer: Trainer, origin: Origin | None) -> str:
    """Load the run's latest state in memory if it is later than the checkpoint or there is none;
    else load the checkpoint, or, if that is damaged and the run's own, its latest intact one.

    Returns:
        Why a later checkpoint of the run was passed over; empty if none was.

    Raises:
        CheckpointError: it is of other tensors, or damaged and no other one is intact.
        ConfigError: the state in memory is beyond the steps that the run asks for.
        OtherSettings: these settings cannot go on with its optimizer's state.
        DataError: the data is not what it was.
    """
    own = trainer.checkpointer
    resumes = origin is None or origin.checkpoints == own.folder
    training = trainer.engine.layout.config.training
    if trainer.restore_local(origin.step if origin is not None and resumes else 0):
        there = Origin(own.folder.parent, trainer.step, weights_only=False)
        _check_steps(there, training, [], continues=True)
        return ""
    if origin is None:
        return ""
    if origin.dense:
        fill = _filling(origin, of_dense(trainer.engine.layout.config).model)
        start_from_dense(trainer.engine, own, f"loading {origin.checkpoints}", fill)
        return ""
    if origin.foreign:
        state = None
        if not origin.weights_only:
            state = own.agree(lambda: megatron_state(origin.checkpoints, training))
        trainer.load_folder(origin.checkpoints, origin.adapter, state)
        return ""
    source = own if resumes else Checkpointer(origin.checkpoints)
    run, new = quote(str(own.folder.parent)), quote(f"{own.folder.parent}-finetuned")
    afresh = f"--load {run} --finetune --save {new}" if resumes else "--finetune"
    try:
        try:
            trainer.restore(source, origin.step, weights_only=origin.weights_only)
        except DamagedCheckpoint as error:
            if not resumes or error.intact is None:
                raise
            trainer.restore(source, error.intact, weights_only=origin.weights_only)
            return error.passed_over
    except DataError as error:  # other data than the checkpoint's
        (mistake,) = error.mistakes
        raise DataError(replace(mistake, works=(afresh,))) from error
    except OtherSettings as error:
        (mistake,) = error.mistakes
        works = tuple(afresh if way == "--finetune" else way for way in mistake.works)
        raise OtherSettings(replace(mistake, works=works)) from error
    return origin.damage


def _filling(origin: Origin, model: ModelConfig) -> Callable[[Mapping[str, Piece]], None]:
    """What fills pieces of a model's weights from the checkpoint that a run starts from."""
    if origin.foreign:
        return partial(fill_finite, origin.checkpoints, model)
    return Checkpointer(origin.checkpoints).filling(origin.step)


def samples_counted(trainer: Trainer) -> str:
    """A note, where schedules in samples assume another number of samples than were consumed; else
    nothing."""
    training, taken = trainer.engine.layout.config.training, trainer.loader.consumed_samples
    counted = training.batch_sizes.samples(trainer.engine.steps)
    if training.train_samples is None or taken == counted:
        return ""
    why = "earlier steps had other sizes, or were left out"
    return f"{taken:,} samples were taken, and {counted:,} count for the learning rate: {why}"


def is_finished(origin: Origin | None, config: Config) -> bool:
    """Whether a run from this checkpoint has no steps left."""
    if origin is None or origin.weights_only:
        return False
    return origin.step == config.training.num_steps


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints of a run folder, or the path itself."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def _check_steps(
    origin: Origin, training: TrainingConfig, earlier: list[int], *, continues: bool
) -> None:
    """Check that the steps asked for go beyond those of the checkpoint, or equal the run's own."""
    step, last = origin.step, training.num_steps
    if step < last or (continues and step == last):
        return
    works = [training.lasting(2 * step)]
    if not continues:
        works += [*(f"--ckpt-step {s}" for s in earlier if s < last), "--finetune"]
    asked = str(training.train_iters)
    if training.train_samples is not None:
        asked = f"{training.train_samples}, which are {several(last, 'step')}"
    whose = "" if continues else "--load "
    what = (
        f"nothing is left to do: {whose}{origin.checkpoints} is at step {step}, and "
        f"train_{training.counted_in} is {asked}"
    )
    attempt = "another --save" if continues else None
    raise ConfigError(Mistake(what, works=tuple(works), attempt=attempt))
