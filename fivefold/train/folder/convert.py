"""Converts a Hugging Face folder to a run folder, and a run's checkpoint to such a folder."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.index import SavedTensor
from fivefold.checkpoint.reader import fill
from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config, read_adapter
from fivefold.config.huggingface.comparing import differences
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.write import to_hf_config
from fivefold.config.model import ModelConfig
from fivefold.config.sources import read_config, to_toml
from fivefold.convert.adapter import with_merged, write_adapter
from fivefold.convert.hub import CONFIG, HubFolder
from fivefold.convert.load import (
    STORED,
    checked_sources,
    fill_from_folder,
    model_in,
    stores_neighbours,
)
from fivefold.convert.non_finite import Converted, spoilt
from fivefold.convert.save import MOST_BYTES, write_weights
from fivefold.convert.stored import numbers_beside, stored_tensors
from fivefold.data.template import FILES as TEMPLATE_FILES
from fivefold.data.template import TOKENIZER_CONFIG, folder_of
from fivefold.data.tokenizer import Tokenizer
from fivefold.data_parallel.policy import DTYPES
from fivefold.description.shape import EMBEDDING
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import (
    as_kind,
    read_json,
    telling_unwritable,
    temporary_path,
    temporary_paths,
    write_atomic,
)
from fivefold.mesh.slices import Piece
from fivefold.train.folder.origin import checkpoints_of
from fivefold.train.folder.run_folder import CHECKPOINTS, TOKENIZER, RunFolder
from fivefold.train.folder.run_tokenizer import run_tokenizer
from fivefold.train.folder.saved_state import SavedState, read_state, reading
from fivefold.train.folder.scratch import holding
from fivefold.train.folder.side_files import (
    GENERATION,
    SIDE,
    keep_side_files,
    side_files,
    whole_model,
)


def to_run(
    source: Path, target: Path, adapter: Path | None = None, model: ModelConfig | None = None
) -> Converted:
    """Make a run folder with a checkpoint at step 0, from weights in another format.

    The whole model is in memory once, in the types of its files.

    Args:
        source: Hugging Face folder, or distributed checkpoint of Megatron-core.
        target: new folder.
        adapter: folder of an adapter to it that PEFT saved; None: the run has none.
        model: our architecture; None: that of the folder's config.json.

    Raises:
        ConfigError: its config.json or the adapter's is not supported.
        CheckpointError: its tensors are not those of the model, or the adapter's not its.
    """
    if model is None:
        beside = None if adapter is None else read_adapter(adapter)
        model = model_in(HubFolder(source), beside)
    sources = checked_sources(source, model, adapter)
    with _finished(target) as folder:
        pieces = {}
        for name, (held, place) in sources.items():
            types = (STORED[held.dtype(stored)] for stored in place.names)  # one for each expert
            dtype = reduce(torch.promote_types, types)
            shape = torch.Size(place.shape)
            whole = tuple(slice(0, size) for size in shape)
            pieces[name] = Piece(torch.empty(shape, dtype=dtype), shape, whole)
        fill_from_folder(source, model, pieces, adapter)
        length = min(4096, model.max_position_embeddings)
        load = None if adapter is None else str(source)  # the model that the adapter is for
        config = Config(model).with_values(seq_length=length, load=load)
        state = SavedState(0, {"consumed_samples": 0, "fingerprint": {}}, asdict(model), length)
        Checkpointer(folder / CHECKPOINTS).save(0, pieces, asdict(state))
        write_atomic(RunFolder(folder).config_file, to_toml(config))
        keep_side_files(source, folder)
        if (source / TOKENIZER).is_file():
            shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
    size = sum(piece.local.nbytes for piece in pieces.values())
    return Converted(size, spoilt({name: piece.local for name, piece in pieces.items()}))


def to_hub(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    most_bytes: float = MOST_BYTES,
    adapter: bool = False,
) -> Converted:
    """Write a checkpoint of a run as a Hugging Face folder.

    Adapters are merged into the weights.

    Args:
        source: run folder, or a folder of checkpoints.
        target: new folder.
        step: step of the checkpoint; None: the latest.
        dtype: type of the weights, by its name in `DTYPES`; None: that of training, or of the files
            that the run was converted from. Biases of routers stay fp32.
        most_bytes: largest size of a file.
        adapter: whether to write the adapters alone, as PEFT keeps them.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or has no such adapters.
        ConfigError: no model family of Hugging Face's has this architecture.
        DataError: the tokenizer is not the one that the run was trained with.
    """
    checkpoints = Checkpointer(checkpoints_of(source), step_flag="--step")

    def write(found: int) -> Converted:
        return _one_to_hub(source, target, checkpoints, found, dtype, most_bytes, adapter=adapter)

    return reading(checkpoints, step, write)


def _one_to_hub(
    source: Path,
    target: Path,
    checkpoints: Checkpointer,
    step: int,
    dtype: str | None,
    most_bytes: float,
    *,
    adapter: bool,
) -> Converted:
    """Write the checkpoint of one step, as `to_hub` does."""
    state = read_state(checkpoints, step)
    model = as_kind(state.model, ModelConfig, f"the model of {source}", CheckpointError)
    path, index = checkpoints.open(step)
    tokenizer = run_tokenizer(source, state) if (source / TOKENIZER).is_file() else None
    fields = _fields(source / SIDE, model.base)
    asked = None if dtype is None else DTYPES[dtype]
    kind = fields["model_type"]
    how, neighbours = FAMILIES[kind].tensors, stores_neighbours(fields)
    places = stored_tensors(how, model.base, neighbours=neighbours)

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        saved = index[name]
        part = torch.empty([s.stop - s.start for s in slices], dtype=saved.dtype)
        fill(path, index, {name: Piece(part, torch.Size(saved.shape), slices)})
        return part

    if adapter:
        if model.lora_rank is None:
            what = f"{source} is of a run without adapters"
            raise CheckpointError(Mistake(what, works=("convert without --adapter",)))
        base = _base(source)
        with _finished(target) as folder:
            types = {name: asked or saved.dtype for name, saved in index.items()}
            return write_adapter(folder, model, kind, places, read, types.__getitem__, base=base)
    types = _written_types(index, asked, _trained_in(source))
    theirs = {name: types[ours] for ours, place in places.items() for name in place.names}
    with _finished(target) as folder:
        whole = with_merged(read, model)
        written = write_weights(
            folder,
            places,
            whole,
            theirs.__getitem__,
            most_bytes=most_bytes,
            numbers=numbers_beside(how, theirs),
        )
        for file in side_files(source):
            shutil.copyfile(file, folder / file.name)
        _describe(source, tokenizer, folder, fields, types[EMBEDDING])
    return written


def _written_types(
    index: Mapping[str, SavedTensor], asked: torch.dtype | None, trained: torch.dtype
) -> dict[str, torch.dtype]:
    """The type in which each tensor is written, by our names: the one the user asked for, else the
    narrower one of training and of the checkpoint."""
    types = {
        name: asked or min(saved.dtype, trained, key=lambda dtype: dtype.itemsize)
        for name, saved in index.items()
    }
    for name in types:
        if name.endswith("expert_bias"):  # which transformers keeps in fp32, whatever the rest is
            types[name] = max(index[name].dtype, torch.float32, key=lambda dtype: dtype.itemsize)
    return types


def _base(source: Path) -> str | None:
    """The weights that a run started from, if they are still there and belong to it."""
    config = _config(source)
    load = None if config is None else config.checkpoint.load
    weights = None if load is None else RunFolder(source).named(load)
    if weights is None or not weights.exists() or whole_model(source) is not None:
        return None  # PEFT would look for adapters of the text model inside the multimodal one
    return str(weights.resolve())


def _trained_in(source: Path) -> torch.dtype:
    config = _config(source)
    return DTYPES["fp64" if config is None else config.training.precision]


def _config(source: Path) -> Config | None:
    """The settings of a run folder; None: it is a folder of checkpoints."""
    file = RunFolder(source).config_file
    return read_config(file) if file.is_file() else None


def _fields(side: Path, model: ModelConfig) -> dict[str, Any]:
    """The config.json that the run was converted from, if it still describes this model; else a new
    one.

    Raises:
        ConfigError: no model family of Hugging Face's has this architecture.
    """
    fields = _json(side / CONFIG)
    if fields is not None and not differences(model, from_hf_config(fields)):
        fields.pop("quantization_config", None)  # weights are written as they were widened
        return fields
    return to_hf_config(model)


def _describe(
    source: Path,
    tokenizer: Tokenizer | None,
    folder: Path,
    fields: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Write config.json, and the run's tokenizer with the fields that transformers needs.

    Files copied from the converted folder stay as they are.
    """
    name = "torch_dtype" if "torch_dtype" in fields else "dtype"
    written = fields | {name: str(dtype).removeprefix("torch.")}
    if tokenizer is not None and not (folder / TOKENIZER).exists():
        shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
        end, name = tokenizer.eod_id, tokenizer.decode([tokenizer.eod_id])
        ends = {"bos_token_id": end, "eos_token_id": end}
        written |= ends
        _write(folder / GENERATION, {"_from_model_config": True, **ends})
        how = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name, "bos_token": name}
        _write(folder / TOKENIZER_CONFIG, how)
        _copy_template(source, folder)
    if written != _json(folder / CONFIG):
        _write(folder / CONFIG, written)


def _copy_template(source: Path, folder: Path) -> None:
    """Copy the chat template that lies beside the run's original tokenizer, if there is one."""
    config = _config(source)
    if config is None or (model := config.data.tokenizer_model) is None:
        return
    beside = folder_of(str(RunFolder(source).named(model)))
    for there in filter(Path.is_file, [beside / name for name in TEMPLATE_FILES]):
        shutil.copyfile(there, folder / there.name)


def _json(file: Path) -> dict[str, Any] | None:
    return read_json(file, dict[str, Any], CheckpointError) if file.is_file() else None


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_atomic(file, json.dumps(content, indent=2) + "\n")


@contextmanager
def _finished(target: Path) -> Iterator[Path]:
    """A temporary folder beside the target, which becomes the target when the block is done.

    Raises:
        CheckpointError: there is something at the target, or nothing can be written there.
    """
    if target.exists():
        what = f"{target} is there already"
        raise CheckpointError(Mistake(what, attempt="another folder"))
    with telling_unwritable(target, CheckpointError):
        target.parent.mkdir(parents=True, exist_ok=True)
    for left in temporary_paths(target.parent, escape(target.name)):
        with holding(left) as dead:
            if dead:
                shutil.rmtree(left, ignore_errors=True)
    folder = temporary_path(target)
    try:
        with telling_unwritable(target, CheckpointError):
            folder.mkdir()
        with holding(folder):
            yield folder
            folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
