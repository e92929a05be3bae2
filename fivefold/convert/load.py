"""Fills our tensors from a Hugging Face or Megatron-core folder, part by part."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from fivefold.checkpoint.matching import check_shapes
from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.adapter import PeftAdapter
from fivefold.config.megatron import is_megatron
from fivefold.config.model import ModelConfig
from fivefold.convert.adapter import open_adapter
from fivefold.convert.hub import HubFolder
from fivefold.convert.megatron import MegatronFolder
from fivefold.convert.megatron_training import training_sources
from fivefold.convert.stored import (
    HEADS,
    Shape,
    Stored,
    copied,
    harmless,
    has_predictions,
    numbers_beside,
    stored_tensors,
    their_name,
)
from fivefold.errors import CheckpointError, Mistake
from fivefold.mesh.slices import Piece

STORED: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float32,  # with its scales
        "MXFP4": torch.bfloat16,  # exact: 3 bits times a power of two
    }
)
"""Types of elements that are read, as files name them, and what keeps each."""
_ROWS = 1024  # rows of the vocabulary compared at a time


def places_in(hub: HubFolder, model: ModelConfig) -> dict[str, Stored]:
    """Where a folder holds each tensor of a model, checked: names and shapes agree.

    Raises:
        CheckpointError: tensors are missing, of another shape or left over.
    """
    places = stored_tensors(hub.how, model, neighbours=stores_neighbours(hub.fields))
    if hub.how.also == "untransposed":
        places = _as_saved(hub, places)
    if hub.how.also == "together" and any(n.endswith(".gate_up_proj") for n in hub.names):
        places = _together(places)
    if hub.how.also == "mixtures":
        places = _as_mixtures(hub, places)
    embedding, head = places["embed_tokens.weight"], their_name(hub.how, model, "lm_head.weight")
    tied, names = not model.untie_embeddings_and_output_weights, hub.names
    if tied and head in names and embedding.names[0] not in names:  # by safetensors' save_model
        places["embed_tokens.weight"] = replace(embedding, names=(head,))
    asked = {name: shape for at in places.values() for name, shape in at.their_shapes.items()}
    saved = {
        name: hub.shape(name)
        for name in names
        if name in asked or not (harmless(hub.how, model, name) or 0 in hub.shape(name))
    }
    check_shapes(hub.path, asked, saved)
    return places


def _as_saved(hub: HubFolder, places: Mapping[str, Stored]) -> dict[str, Stored]:
    """Matrices of Qwen3-VL's experts as published, or as transformers 5 saves them, not transposed.

    One of the two sizes of a matrix may equal the other, but not for both kinds of matrices.
    """
    moved = {name: replace(at, transposed=False) for name, at in places.items() if at.transposed}
    names, there = hub.names, [places[name] for name in moved]
    found = [at for at in there if at.names[0] in names]
    if all(hub.shape(at.names[0]) == at.their_shape for at in found):
        return dict(places)
    return {**places, **moved}


def _as_mixtures(hub: HubFolder, places: Mapping[str, Stored]) -> dict[str, Stored]:
    """Dense MLPs of Kimi Linear as published, or as transformers saves them: named as those with
    experts."""
    names, found = hub.names, dict(places)
    for name, at in places.items():
        other = at.names[0].replace(".mlp.", ".block_sparse_moe.")
        if at.names[0] not in names and other in names:
            found[name] = replace(at, names=(other,))
    return found


def _together(places: Mapping[str, Stored]) -> dict[str, Stored]:
    """Experts of Qwen3.5 as published, gate and up of all of them in one tensor; transformers saves
    them one by one."""
    found = dict(places)
    for name, at in places.items():
        if not at.by_expert:
            continue
        before = at.names[0].partition(".experts.")[0]
        size = at.shape[-2]
        if "down_proj" in name:
            found[name] = replace(at, names=(f"{before}.experts.down_proj",), by_expert=False)
            continue
        first = size if "up_proj" in name else 0
        joint = replace(at, names=(f"{before}.experts.gate_up_proj",), by_expert=False)
        found[name] = replace(joint, rows=torch.arange(first, first + size), of=2 * size)
    return found


def check_copies(hub: HubFolder, model: ModelConfig) -> None:
    """Check that a folder's copies of the embedding or head equal it, if the model shares the
    weight.

    Raises:
        CheckpointError: a tensor is another than the one in its place.
    """
    for name in sorted(hub.names):
        original = copied(hub.how, model, name)
        if original is None or original not in hub.names or _equal(hub, name, original):
            continue
        what = f"{hub.path}: {name} is not {original}, and the model has one for both"
        apart = '"tie_word_embeddings": false in config.json'
        works = apart if name.startswith(HEADS) else "--mtp-num-layers 0"
        raise CheckpointError(Mistake(what, works=(works,)))


def check_numbers(hub: HubFolder) -> None:
    """Check that numbers which a folder stores as tensors equal those of the family, to bf16's
    precision.

    Raises:
        CheckpointError: one is another.
    """
    names = hub.names
    for name, (_, number) in numbers_beside(hub.how, names).items():
        if name in names:
            held = hub.read(name, ())
            if held.bfloat16() != torch.tensor(number).bfloat16():
                raise CheckpointError(f"{hub.path}: {name} is {held.item():g}, not {number:g}")


def _equal(hub: HubFolder, name: str, other: str) -> bool:
    """Whether two tensors have the same elements; only some rows are in memory at a time."""
    shape = hub.shape(name)
    if hub.shape(other) != shape:
        return False
    rest = tuple(slice(0, size) for size in shape[1:])
    parts = [(slice(at, min(at + _ROWS, shape[0])), *rest) for at in range(0, shape[0], _ROWS)]
    return all(
        torch.equal(hub.read(name, part).double(), hub.read(other, part).double()) for part in parts
    )


def model_in(hub: HubFolder, adapter: PeftAdapter | None = None) -> ModelConfig:
    """The architecture of a folder: that of its config.json, without predictions that it lacks,
    with these adapters.

    transformers neither loads nor saves DeepSeek-V3's layers of multi-token prediction, so that
    an adapter made with it has none in them, wherever the weights have them.

    Raises:
        ConfigError: the config.json is not supported.
    """
    model = from_hf_config(hub.fields)
    named: list[Iterable[str]] = [hub.names]
    if adapter is not None:
        model = replace(model, **adapter.settings)
        named.append(adapter.modules)
    if all(has_predictions(hub.how, model, names) for names in named):
        return model
    return model.without_predictions


def stores_neighbours(fields: Mapping[str, object]) -> bool:
    """Whether a config.json says that rotary features are stored as pairs of neighbours."""
    return bool(fields.get("rope_interleave", True))


class Reads(Protocol):
    """A folder of tensors."""

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor."""

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""

    def dtype(self, name: str) -> str:
        """The type of a tensor's elements, as the files name it."""


def sources_in(
    path: Path, model: ModelConfig, adapter: Path | None, *, trained: bool
) -> dict[str, tuple[Reads, Stored]]:
    """The folder that holds each tensor of a model, and where; checked.

    Args:
        path: folder of the model without adapters, as Hugging Face or Megatron-core has it.
        model: our architecture.
        adapter: folder of its adapters, as PEFT has them; None: it has none, or new ones.
        trained: whether masters are meant where weights are named, and moments are wanted, too;
            Megatron-core alone has them.

    Raises:
        ConfigError: the adapters cannot be read.
        CheckpointError: tensors are missing, of another shape or left over, or the adapters are
            not those of the model.
    """
    if is_megatron(path):
        of_megatron = MegatronFolder(path)
        if trained:
            return {**training_sources(of_megatron, model)}
        return {name: (of_megatron, at) for name, at in of_megatron.places(model.base).items()}
    hub = HubFolder(path)
    places = places_in(hub, model.base)
    found: dict[str, tuple[Reads, Stored]] = {name: (hub, at) for name, at in places.items()}
    if adapter is not None:
        files, beside = open_adapter(adapter, model, hub.kind, places)
        found |= {name: (files, at) for name, at in beside.items()}
    return found


def checked_sources(
    path: Path, model: ModelConfig, adapter: Path | None = None, *, trained: bool = False
) -> dict[str, tuple[Reads, Stored]]:
    """`sources_in`, with the checks that need not run on each rank: types, scales, values of
    copies.

    Raises:
        ConfigError: the adapters cannot be read.
        CheckpointError: as for `sources_in`; or a tensor's type is not known, scales do not fit, or
            a copy is none.
    """
    sources = sources_in(path, model, adapter, trained=trained)
    for held, place in sources.values():
        for name in place.names:
            if held.dtype(name) not in STORED:
                what = f"{path}: {name} is stored as {held.dtype(name)}"
                raise CheckpointError(Mistake(what, works=tuple(STORED)))
    if not is_megatron(path):
        hub = HubFolder(path)
        hub.check_scales()
        check_copies(hub, model.base)
        check_numbers(hub)
    return sources


def fill_from_folder(
    path: Path,
    model: ModelConfig,
    pieces: Mapping[str, Piece],
    adapter: Path | None = None,
    *,
    trained: bool = False,
) -> None:
    """Fill each piece in place; values are converted to its type, padding becomes zero.

    Args:
        path: folder of the model, as Hugging Face or Megatron-core has it.
        model: our architecture; its sizes are those of the folder.
        pieces: pieces of our parameters and buffers, by name.
        adapter: folder of the adapters that are among the pieces; None: none are.
        trained: as for `sources_in`; moments are among the pieces by their names in a checkpoint.

    Raises:
        CheckpointError: the folder's tensors are not those of the model, or cannot be read.
    """
    sources = sources_in(path, model, adapter, trained=trained)
    for name, piece in pieces.items():
        if piece.local.numel():
            fill_piece(*sources[name], piece)


def fill_piece(folder: Reads, place: Stored, piece: Piece) -> None:
    """Fill a piece of one of our tensors in place, from where the tensor is stored."""
    target = piece.local.detach()
    if place.joined:
        _fill_joined(folder, place, piece)
        return
    if not place.by_expert:
        target.copy_(_read(folder, place, place.names[0], piece.slices))
        return
    experts, *inner = piece.slices
    for at, name in enumerate(place.names[experts]):
        target[at].copy_(_read(folder, place, name, tuple(inner)))


def _fill_joined(folder: Reads, place: Stored, piece: Piece) -> None:
    """Fill a piece from several tensors there, each of which holds some of its rows."""
    target, axis, own = piece.local.detach(), place.axis, piece.slices[place.axis]
    for name in place.names:
        part, ours = place.one_of(name)
        here = ((ours >= own.start) & (ours < own.stop)).nonzero().flatten()
        if not len(here):
            continue
        slices = list(piece.slices)
        slices[axis] = slice(int(here[0]), int(here[-1]) + 1)  # `ours` ascends
        values = _read(folder, part, name, tuple(slices))
        at = (ours[here] - own.start).to(target.device)
        target.index_copy_(axis, at, values.to(target.device, target.dtype))


def _read(folder: Reads, place: Stored, name: str, slices: tuple[slice, ...]) -> Tensor:
    """A part of a tensor there, in our order and orientation."""
    axis, wanted = place.axis, list(slices)
    rows = None if place.rows is None else place.rows[slices[axis]]
    if rows is not None:
        if not len(rows):  # padding alone
            return torch.zeros([part.stop - part.start for part in slices])
        wanted[axis] = slice(int(rows.min()), int(rows.max()) + 1)
    if place.transposed:
        wanted[-2:] = wanted[:-3:-1]
    before, after = place.around
    one = slice(0, 1)
    part = place.bare(folder.read(name, (*[one] * before, *wanted, *[one] * after)))
    if place.transposed:
        part = part.transpose(-1, -2)
    if rows is None:
        return part
    part = part.index_select(axis, rows - rows.min())
    missing = slices[axis].stop - slices[axis].start - len(rows)
    if not missing:
        return part
    shape = list(part.shape)
    shape[axis] = missing
    return torch.cat([part, part.new_zeros(shape)], axis)
