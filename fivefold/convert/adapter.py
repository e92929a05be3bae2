"""Adapters as PEFT keeps them (adapter_config.json, adapter_model.safetensors): out, and in."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.matching import check_shapes
from fivefold.checkpoint.tensor_file import write_tensors
from fivefold.config.config import SETTINGS as OURS
from fivefold.config.huggingface.adapter import (
    ADAPTER,
    PREFIX,
    SETTINGS,
    PeftAdapter,
    end_of,
    read_adapter,
)
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.model import ModelConfig
from fivefold.config.rules.lora import linear_names
from fivefold.convert.non_finite import Converted, spoilt
from fivefold.convert.save import ReadPart, made_of, theirs
from fivefold.convert.stored import Stored, has_predictions
from fivefold.convert.tensor_files import TensorFiles
from fivefold.description.shape import parameter_shapes, stage_weights
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import tensor_names, write_atomic
from fivefold.model.lora import LORA, MAGNITUDE

_OF_CONVOLUTIONS = "in_proj_xc", "in_proj_b"
"""Projections of a short convolution that make one where transformers keeps them."""
_OF_EXPERTS = "gate_proj", "up_proj", "down_proj"
"""Names that PEFT 0.21 maps to the joint parameters that experts have in transformers 5."""


def with_merged(read: ReadPart, model: ModelConfig) -> ReadPart:
    """`read` for a model's weights, with W + s B A instead of W where it has an adapter.

    The sum is computed in at least fp32; with magnitudes (DoRA) its rows are scaled to these
    lengths.
    """
    if model.lora_rank is None:
        return read
    shapes = parameter_shapes(model)
    adapted = {name.split(LORA)[0] for name in shapes if LORA in name}
    rank = slice(0, model.lora_rank)

    def merged(name: str, slices: tuple[slice, ...]) -> Tensor:
        linear = name.removesuffix(".weight")
        if linear not in adapted or not name.endswith(".weight"):
            return read(name, slices)
        rows, columns = slices
        inputs = slice(0, shapes[name][1]) if model.use_dora else columns
        part = read(name, (rows, inputs))
        down, up = (
            read(f"{linear}{LORA}{which}.weight", of).to(
                torch.promote_types(part.dtype, torch.float32)
            )
            for which, of in (("A", (rank, inputs)), ("B", (rows, rank)))
        )
        whole = part.to(down.dtype).addmm_(up, down, alpha=model.lora_scale)
        if not model.use_dora:
            return whole
        lengths = read(f"{linear}{MAGNITUDE}", (rows,)) / torch.linalg.vector_norm(whole, dim=1)
        return whole[:, columns] * lengths[:, None]

    return merged


def write_adapter(
    folder: Path,
    model: ModelConfig,
    kind: str,
    places: Mapping[str, Stored],
    read: ReadPart,
    dtype_of: Callable[[str], torch.dtype],
    *,
    base: str | None,
) -> Converted:
    """Write the adapters of a model to an existing folder.

    Args:
        folder: an existing folder.
        model: our architecture, with adapters.
        kind: family of the model, the `model_type` of its config.json.
        places: where each weight of the model without adapters lies in its folder.
        read: reads a part of a tensor of ours.
        dtype_of: type to which a tensor of ours is rounded.
        base: where the model without adapters is, which PEFT is to load; None: not known.

    Raises:
        CheckpointError: PEFT could not load them.
    """
    if why := _why_not(model, kind):
        raise CheckpointError(Mistake(why, works=("convert without --adapter: merged",)))
    tensors = {
        name: made_of(parts, read, dtype_of(parts[0].name))
        for name, parts in theirs(adapter_places(model, places)).items()
    }
    write_tensors(folder / ADAPTER, tensors, {"format": "pt"})
    write_atomic(folder / SETTINGS, json.dumps(_settings(model, tensors, base), indent=2) + "\n")
    return Converted(sum(values.nbytes for values in tensors.values()), spoilt(tensors))


def adapter_places(model: ModelConfig, places: Mapping[str, Stored]) -> dict[str, Stored]:
    """Where PEFT keeps the adapters of a model, by our names.

    Args:
        model: our architecture, with adapters.
        places: where each weight of the model without adapters lies.
    """
    found = {}
    for name, weight in stage_weights(model).items():
        if LORA not in name:
            continue
        linear, which = name.split(LORA)
        place = places[f"{linear}.weight"]
        there = f"{PREFIX}{place.names[0].removesuffix('.weight')}{LORA}{which}"
        rows = None if which.startswith("A") else place.rows
        found[name] = Stored(weight.shape, (there,), -len(weight.shape), rows)
    return found


def open_adapter(
    folder: Path, model: ModelConfig, kind: str, places: Mapping[str, Stored]
) -> tuple[TensorFiles, dict[str, Stored]]:
    """The tensors of an adapter that PEFT saved, and where each of ours lies among them.

    Args:
        folder: its folder.
        model: our architecture, with adapters.
        kind: family of the model, the `model_type` of its config.json.
        places: where each weight of the model without adapters lies.

    Raises:
        ConfigError: it is no adapter that can be read.
        CheckpointError: it is another one than the model has, or of another model.
    """
    adapter = read_adapter(folder)
    if why := _joint(model, kind):
        raise CheckpointError(f"{folder}: {why}")
    _see_settings(adapter, model)
    if model.mtp_num_layers and not has_predictions(FAMILIES[kind].tensors, model, adapter.modules):
        what = f"{folder} has no adapters for the layers of multi-token prediction"
        why = "transformers leaves these layers out, and so does an adapter that was made with it"
        raise CheckpointError(Mistake(what, (why,), works=("--mtp-num-layers 0",)))
    _see_targets(adapter, places)
    files = TensorFiles(
        folder, dict.fromkeys(tensor_names(folder / ADAPTER, CheckpointError), folder / ADAPTER)
    )
    asked = adapter_places(model, places)
    shapes = {place.names[0]: place.their_shape for place in asked.values()}
    saved = {name: files.shape(name) for name in files.files}
    check_shapes(folder, shapes, saved)
    return files, asked


def _see_settings(adapter: PeftAdapter, model: ModelConfig) -> None:
    """Check that a model has the adapters of a folder; their dropout matters only in training."""
    there = replace(model, **adapter.settings)
    changed = {
        name: value
        for name, value in adapter.settings.items()
        if getattr(model, name) != value and name not in ("lora_target_modules", "lora_dropout")
    }
    if [*map(model.adapts, linear_names(model))] != [*map(there.adapts, linear_names(model))]:
        changed["lora_target_modules"] = adapter.settings["lora_target_modules"]
    if changed:
        lines = tuple(
            f"{name}: is {OURS[name].words(getattr(model, name))}, there {OURS[name].words(there)}"
            for name, there in changed.items()
        )
        works = " ".join(OURS[name].typed(value) for name, value in changed.items())
        what = f"{adapter.folder} holds adapters that these settings do not describe"
        raise CheckpointError(Mistake(what, lines, works=(works,)))


def _see_targets(adapter: PeftAdapter, places: Mapping[str, Stored]) -> None:
    """Check that a file has adapters for the linear layers that its settings name."""
    linears = {
        name.removesuffix(".weight")
        for place in places.values()
        for name in place.names
        if len(place.their_shape) > 1 and name.endswith(".weight")
    }
    wanted = {name for name in linears | adapter.modules if adapter.looks_for(name)}
    wrong = [
        *(f"{name}: named, and no tensors" for name in sorted(wanted - adapter.modules)),
        *(f"{name}: not named, and has tensors" for name in sorted(adapter.modules - wanted)),
    ]
    if wrong:
        what = f"{adapter.folder}: target_modules is not what {ADAPTER} has"
        raise CheckpointError(Mistake(what, tuple(wrong[:8])))


def _why_not(model: ModelConfig, kind: str) -> str:
    """Why PEFT could not load the adapters; empty if it can."""
    if why := _joint(model, kind):
        return why
    taken = [name for name in linear_names(model) if model.adapts(name) and name in _OF_EXPERTS]
    if model.num_experts is not None and taken:
        return f"PEFT takes {' '.join(taken)} of a model with experts for adapters of the experts"
    return ""


def _joint(model: ModelConfig, kind: str) -> str:
    """Why one adapter there would be several here, or none; empty if they match one to one."""
    if model.hybrid_override_pattern is not None:
        return f"{kind} has layers with Mamba-2, which have no adapters here"
    if model.fades_features:
        return f"{kind} has layers with Kimi Delta Attention, which have no adapters here"
    files = FAMILIES[kind].tensors
    if files.renamed:
        return f"modules of {kind}, by which adapters are named, are not those of its files"
    if files.joint_qkv is not None:
        return f"{kind} has queries, keys and values in one linear layer, which has one adapter"
    has = {name.split(".")[-2] for name in parameter_shapes(model) if "." in name}
    apart = [name for name in (ours.removesuffix(".") for ours in files.apart) if name in has]
    if any(map(model.adapts, apart)):
        return f"{kind} has several linear layers for {' and '.join(apart)}, with an adapter each"
    if any(map(model.adapts, _OF_CONVOLUTIONS)) and has.issuperset(_OF_CONVOLUTIONS):
        return f"{kind} has {' and '.join(_OF_CONVOLUTIONS)} in one linear layer, in_proj"
    if files.joint_mlp and (model.adapts("gate_proj") or model.adapts("up_proj")):
        return f"{kind} has gate_proj and up_proj in one linear layer, which has one adapter"
    return ""


def _settings(
    model: ModelConfig, tensors: Mapping[str, Tensor], base: str | None
) -> dict[str, Any]:
    """The settings that PEFT asks for."""
    targets = {end_of(name.split(LORA)[0]) for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": model.lora_dropout,
        "use_rslora": model.use_rslora,
        "use_dora": model.use_dora,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }
