"""Writes adapters as PEFT keeps them (adapter_config.json, adapter_model.safetensors)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.config.lora_rules import linear_names
from fivefold.config.model import ModelConfig
from fivefold.convert.save import ReadPart
from fivefold.convert.stored import Stored
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import write_atomic
from fivefold.model.lora import LORA
from fivefold.model.shape import stage_weights

ADAPTER, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_JOINT = "gpt2", "gpt_neox"
"""Families whose queries, keys and values are one linear layer in transformers."""
_OF_EXPERTS = "gate_proj", "up_proj", "down_proj"
"""Names that PEFT 0.21 maps to the joint parameters that experts have in transformers 5."""


def with_merged(read: ReadPart, model: ModelConfig) -> ReadPart:
    """`read` of a model's weights, with W + s B A in the place of W where it has an adapter.

    The sum is made in at least fp32.
    """
    if model.lora_rank is None:
        return read
    adapted = {name.split(LORA)[0] for name in stage_weights(model) if LORA in name}
    rank = slice(0, model.lora_rank)

    def merged(name: str, slices: tuple[slice, ...]) -> Tensor:
        part, linear = read(name, slices), name.removesuffix(".weight")
        if linear not in adapted or not name.endswith(".weight"):
            return part
        rows, columns = slices
        down, up = (
            read(f"{linear}{LORA}{which}.weight", of).to(
                torch.promote_types(part.dtype, torch.float32)
            )
            for which, of in (("A", (rank, columns)), ("B", (rows, rank)))
        )
        return part.to(down.dtype).addmm_(up, down, alpha=model.lora_scale)

    return merged


def write_adapter(
    folder: Path,
    model: ModelConfig,
    kind: str,
    places: Mapping[str, Stored],
    read: ReadPart,
    *,
    base: str | None,
    dtype: torch.dtype | None,
) -> int:
    """Write the adapters of a model to an existing folder, and return the number of their bytes.

    Args:
        folder: an existing folder.
        model: our architecture, with adapters.
        kind: family of the model, the `model_type` of its config.json.
        places: where each weight of the model without adapters lies in its folder.
        read: reads a part of a tensor of ours.
        base: where the model without adapters is, which PEFT is to load; None: not known.
        dtype: type of the adapters; None: that of the run.

    Raises:
        CheckpointError: PEFT could not load them.
    """
    from safetensors.torch import save_file

    if why := _why_not(model, kind):
        raise CheckpointError(str(Mistake(why, works=("convert without --adapter: merged",))))
    tensors: dict[str, Tensor] = {}
    for name, weight in stage_weights(model).items():
        if LORA not in name:
            continue
        linear, which = name.split(LORA)
        place = places[f"{linear}.weight"]
        values = read(name, tuple(slice(0, size) for size in weight.shape))
        if which.startswith("B") and place.rows is not None:  # in the order of theirs
            values = torch.empty_like(values).index_copy_(0, place.rows, values)
        theirs = place.names[0].removesuffix(".weight")
        tensors[f"base_model.model.{theirs}.lora_{which}"] = values.to(dtype or values.dtype)
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    write_atomic(folder / SETTINGS, json.dumps(_settings(model, tensors, base), indent=2) + "\n")
    return sum(values.nbytes for values in tensors.values())


def _why_not(model: ModelConfig, kind: str) -> str:
    """Why PEFT could not load the adapters; empty if it can."""
    if kind in _JOINT:
        return f"{kind} has queries, keys and values in one linear layer, which has one adapter"
    taken = [name for name in linear_names(model) if model.adapts(name) and name in _OF_EXPERTS]
    if model.num_experts is not None and taken:
        return f"PEFT takes {' '.join(taken)} of a model with experts for adapters of the experts"
    return ""


def _settings(
    model: ModelConfig, tensors: Mapping[str, Tensor], base: str | None
) -> dict[str, Any]:
    """What PEFT asks for."""
    targets = {name.split(LORA)[0].rpartition(".")[2] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "use_rslora": model.use_rslora,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }
