"""Evaluates a checkpoint of a run over validation sets, in any layout."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.data.dataset import content
from fivefold.data.prepare import PreparedData, Progress, prepare
from fivefold.data.validation import ValidationSet, has_split, validation_sets
from fivefold.errors import DataError, Mistake
from fivefold.files import write_atomic
from fivefold.layout import Layout
from fivefold.optim.adamw import OPTIMIZER
from fivefold.train.engine import Engine
from fivefold.train.evaluation import evaluations
from fivefold.train.folder.origin import checkpoints_of
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.folder.run_tokenizer import run_tokenizer
from fivefold.train.folder.saved_state import SavedState, read_state, reading, same_model
from fivefold.train.folder.scratch import scratch_folder
from fivefold.train.machine.devices import Asked, choose_device, visible_gpus
from fivefold.train.machine.threads import choose_threads
from fivefold.train.metrics import EvalMetrics
from fivefold.train.places import join_group
from fivefold.train.ranks.launch import run_ranks
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import several


@dataclass(frozen=True)
class Evaluated:
    """The loss of a checkpoint over a validation set.

    Attributes:
        metrics: loss, perplexity and number of tokens.
        samples: samples that were read.
        text_bytes: bytes of the text of these tokens; None if they are not known.
    """

    metrics: EvalMetrics
    samples: int
    text_bytes: int | None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of text, which does not depend on the tokenizer."""
        if not self.text_bytes:
            return None
        return self.metrics.loss * self.metrics.tokens / math.log(2) / self.text_bytes


def evaluate_run(
    run: Path,
    layout: Layout,
    *,
    step: int | None,
    device: Asked,
    progress: Progress,
) -> list[Evaluated]:
    """Evaluate a checkpoint in processes started on this machine, one for each rank of a layout.

    Args:
        run: a run folder.
        layout: checked layout, of the run's model; its settings say which sets are read.
        step: step of the checkpoint; the latest when None.
        device: where the ranks compute.
        progress: function that is told of work on the data.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError, DataError: the data cannot be read, or is too little.
        FivefoldError: a rank failed, which has printed why.
    """
    source = Checkpointer(checkpoints_of(run), step_flag="--step")
    state = reading(source, step, partial(read_state, source))
    same_model(state.model, layout.config.model, source.folder)
    data = _data(run, state, layout.config, progress)
    if _differs(data, state):
        changed = "the text is not what it was when the run was trained"
        progress(f"{changed}, so that samples which were trained on may be among those read here")
    sets = validation_sets(layout.config.training, data)
    for each in sets:
        if (there := each.dataset.num_samples) < each.samples:  # only for the split
            again = (
                f"{each.samples:,} are read, some of them again; --full-validation reads each once"
            )
            progress(f"the validation split has {several(there, 'sample')}: {again}")
    found = _on_ranks(layout, (source.folder, step), sets, device)
    return [
        Evaluated(metrics, each.samples, each.text_bytes(data.tokenizer))
        for metrics, each in zip(found, sets, strict=True)
    ]


def _data(run: Path, state: SavedState, config: Config, progress: Progress) -> PreparedData:
    """The validation sets, tokenised with the run's tokenizer, wherever that came from."""
    data, training = config.data, config.training
    tokenizer = RunFolder(run).tokenizer
    if data.sft and data.tokenizer_model is not None:  # the template lies beside it
        tokenizer = RunFolder(run).named(data.tokenizer_model)
    else:
        run_tokenizer(run, state)
    data = replace(data, tokenizer_model=str(tokenizer))
    splits = has_split(data.split, data.valid_data_path)
    try:
        return prepare(data, training.seq_length, training.seed, progress, named_only=not splits)
    except DataError as error:
        raise DataError(*map(_without_path, error.mistakes)) from error


def _without_path(mistake: Mistake) -> Mistake:
    """The mistake, without a flag that only training has."""
    works = (each for each in mistake.works if not each.startswith("--data-path"))
    return replace(mistake, works=tuple(works))


def _differs(data: PreparedData, state: SavedState) -> bool:
    """Whether corpora have other tokens than the ones that the run split."""
    then = state.loader["fingerprint"].get("data", [])
    now = [corpus.identity() for corpus in data.corpora]
    what, was = ([content(text) for text in texts] for texts in (now, then))
    return bool(what) and bool(was) and what != was


def evaluate_rank(
    engine: Engine, source: tuple[Path, int | None], sets: Sequence[ValidationSet]
) -> list[EvalMetrics]:
    """Load a checkpoint, of a folder and a step, into an engine and evaluate it; collective.

    If no step is named it is the latest, which may be newer than when the data was prepared.
    """
    folder, step = source
    checkpoints = Checkpointer(folder, step_flag="--step")
    weights = engine.stored_weights()

    def load(found: int) -> int:
        checkpoints.load(found, weights, skip=(OPTIMIZER,))
        return found

    loaded = reading(checkpoints, step, load)
    engine.after_load(loaded, weights)
    return [*evaluations(engine, sets, loaded)]


def _on_ranks(
    layout: Layout, source: tuple[Path, int | None], sets: Sequence[ValidationSet], asked: Asked
) -> list[EvalMetrics]:
    world = layout.grid.world_size
    device = choose_device(asked, RankEnv(), world, visible_gpus())
    with scratch_folder("eval") as folder:
        result = folder / "losses.json"

        def rank(env: RankEnv) -> None:
            here = join_group(layout.config, env, device)
            found = evaluate_rank(Engine(layout, env.rank, here, initialises=False), source, sets)
            if env.rank == 0:
                write_atomic(result, json.dumps([asdict(metrics) for metrics in found]))

        threads = choose_threads(layout, world, device.kind).count
        end = run_ranks(rank, world, describe=layout.grid.name, threads=threads)
        end.raise_if_failed("the evaluation failed")
        return [EvalMetrics(**each) for each in json.loads(result.read_text())]
