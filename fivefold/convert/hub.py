"""Reads parts of the tensors in a Hugging Face folder with one file or several."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.config.huggingface.family import Tensors
from fivefold.config.huggingface.multimodal import (
    is_multimodal,
    part_of,
    tensors_of,
    text_kind,
    text_name,
)
from fivefold.convert.stored import HEADS, Shape
from fivefold.convert.tensor_files import TensorFiles
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import as_kind, read_json, tensor_names
from fivefold.units import several

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
_SCALES, _BLOCKS, _BLOCK_SCALES = "_scale_inv", "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign (OCP Microscaling 1.0)


def is_hub_folder(path: Path) -> bool:
    """Whether a folder holds a model as Hugging Face does: config.json, and weights, which may be
    older ones that are refused."""
    weights = any(any(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    return (path / CONFIG).is_file() and weights


@dataclass
class HubFolder:
    """The tensors of a folder, each read by slices, so that a rank reads no more than its own.

    fp8 weights with block scales (DeepSeek-V3) and MXFP4 (gpt-oss) are widened as they are read. Of
    a multimodal model, the tensors are those of its text model, by the names that they have there.

    Attributes:
        path: the folder.
        fields: its config.json.
        how: how it holds tensors.
        parts: parts beside the text model, with the names of their tensors.
    """

    path: Path
    fields: Mapping[str, Any] = field(init=False)
    how: Tensors = field(init=False)
    parts: dict[str, list[str]] = field(default_factory=dict, init=False)
    _tensors: TensorFiles = field(init=False)
    _actual: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.fields = read_json(self.path / CONFIG, dict[str, Any], CheckpointError)
        self.how = tensors_of(self.fields)
        files = self._find()
        self._tensors = TensorFiles(self.path, files)
        self._actual = self._by_full_name(files)

    @property
    def kind(self) -> str:
        """The family; of a multimodal model, its text model's."""
        return str(text_kind(self.fields))

    def parts_left_out(self) -> str:
        """The parts of a multimodal model that are left out, each with its size; empty if none
        is."""
        parts = []
        for part, names in self.parts.items():
            size = sum(math.prod(self._tensors.shape(name)) for name in names)
            parts.append(f"{part} ({several(len(names), 'tensor')}, {size:,} parameters)")
        return ", ".join(parts)

    def _by_full_name(self, files: Iterable[str]) -> dict[str, str]:
        """For each tensor, by its name in the model or its text model, its name in the files."""
        found: dict[str, str] = {}
        base, whole = self.how.base, is_multimodal(self.fields)
        known = (*HEADS, base, *filter(None, (self.how.further,)))
        for name in files:
            if whole and (part := part_of(name)) is not None:
                self.parts.setdefault(part, []).append(name)
                continue
            text = text_name(name) if whole else name
            full = text if text.startswith(known) else base + text
            if full in found:
                raise CheckpointError(f"{self.path} has {full} twice: as {found[full]} and {name}")
            found[full] = name
        return found

    @property
    def names(self) -> set[str]:
        """Its tensors by their full names, without those that hold scales of other tensors."""
        found = set()
        for name in self._actual:
            if (
                name.endswith(_BLOCKS)
                and name.removesuffix(_BLOCKS) + _BLOCK_SCALES in self._actual
            ):
                found.add(name.removesuffix(_BLOCKS))
            elif not self._scales_another(name):
                found.add(name)
        return found

    def _scales_another(self, name: str) -> bool:
        if name.endswith(_SCALES):
            return self._is_fp8(name.removesuffix(_SCALES))
        return name.endswith(_BLOCK_SCALES) and (
            name.removesuffix(_BLOCK_SCALES) + _BLOCKS in self._actual
        )

    def _is_fp8(self, name: str) -> bool:
        return name in self._actual and self.dtype(name).startswith("F8_")

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        if name in self._actual:
            return tuple(self._slice(name).get_shape())
        packed = tuple(self._slice(name + _BLOCKS).get_shape())
        if len(packed) != 4:  # not MXFP4, and so not of a shape that fits
            return packed
        experts, rows, blocks, size = packed  # as [E, columns, rows]
        return experts, 2 * blocks * size, rows

    def check_scales(self) -> None:
        """Check that every tensor in 8 bits or fewer has scales that fit it.

        Raises:
            CheckpointError: they are missing, or of another shape or type.
        """
        for name in sorted(self.names):
            if self._is_fp8(name):
                scales, shape = name + _SCALES, self.shape(name)
                sizes = self._block_sizes()
                blocks = tuple(-(-n // size) for n, size in zip(shape, sizes, strict=False))
                fits = len(shape) == 2
            elif name not in self._actual:
                scales, of = name + _BLOCK_SCALES, name + _BLOCKS
                blocks = self.shape(of)[:-1]
                fits = self.dtype(of) == self.dtype(scales) == "U8"
            else:
                continue
            found = self.shape(scales) if scales in self._actual else None
            if not fits or found != blocks:
                kind, asked = self.dtype(name), " x ".join(map(str, blocks))
                there = "has none" if found is None else f"has {' x '.join(map(str, found))}"
                what = f"{self.path}: {name} is stored as {kind}, with scales that do not fit"
                raise CheckpointError(Mistake(what, (f"{asked} are needed, it {there}",)))

    def _block_sizes(self) -> tuple[int, int]:
        """Rows and columns that share a scale of fp8."""
        how = self.fields.get("quantization_config") or {}
        sizes = how.get("weight_block_size", [128, 128]) if isinstance(how, Mapping) else None
        of = f"weight_block_size of {self.path / CONFIG}"
        rows, columns = as_kind(sizes, tuple[int, int], of, CheckpointError)
        if min(rows, columns) < 1:
            raise CheckpointError(f"{of} must be positive, not {sizes}")
        return rows, columns

    def dtype(self, name: str) -> str:
        """The type of a tensor's elements, by its name in the file; MXFP4 is "MXFP4"."""
        return str(self._slice(name).get_dtype()) if name in self._actual else "MXFP4"

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor.

        Raises:
            CheckpointError: its file cannot be read.
        """
        if name not in self._actual:
            return self._widened(name, slices)
        part = self._tensors.read(self._actual[name], slices)
        if self._is_fp8(name):
            part = part.float() * self._scale(name, slices)
        return part

    def _scale(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """fp8's scales, each for a block of elements, for a part of a matrix."""
        sizes = self._block_sizes()
        blocks = tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(slices, sizes, strict=True)
        )
        scale: Tensor = self._slice(name + _SCALES)[blocks].float()
        for dim, (part, size) in enumerate(zip(slices, sizes, strict=True)):
            first = part.start % size
            scale = scale.repeat_interleave(size, dim)
            scale = scale.narrow(dim, first, part.stop - part.start)
        return scale

    def _widened(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of [E, columns, rows] from MXFP4: 32 elements in 16 bytes share a power of two."""
        experts, columns, rows = slices
        blocks: Tensor = self._slice(name + _BLOCKS)[experts, rows]
        scales: Tensor = self._slice(name + _BLOCK_SCALES)[experts, rows]
        values = torch.tensor([*_FP4, *(-value for value in _FP4)])
        pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).long()
        wide = values[pairs].flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        return wide.flatten(-2).transpose(1, 2)[:, columns]

    def _slice(self, name: str) -> Any:
        return self._tensors.slice(self._actual[name])

    def _find(self) -> dict[str, Path]:
        """The file of each tensor: from the only file or the index, in transformers' order; else
        from all files."""
        if (self.path / WHOLE).is_file():
            names = tensor_names(self.path / WHOLE, CheckpointError)
            return dict.fromkeys(names, self.path / WHOLE)
        if (self.path / INDEX).is_file():
            index = read_json(self.path / INDEX, dict[str, Any], CheckpointError)
            places = index.get("weight_map")
            if not isinstance(places, dict):
                raise CheckpointError(f"{self.path / INDEX} has no weight_map")
            missing = sorted({f for f in places.values() if not (self.path / str(f)).is_file()})
            if missing:
                what = f"{self.path} lacks {len(missing)} of its files"
                raise CheckpointError(Mistake(what, (", ".join(map(str, missing[:8])),)))
            return {name: self.path / str(file) for name, file in places.items()}
        found: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            for name in tensor_names(file, CheckpointError):
                if name in found:
                    what = f"{self.path} has {name} twice: in {found[name].name} and {file.name}"
                    raise CheckpointError(Mistake(what, works=(INDEX, WHOLE)))
                found[name] = file
        if not found:
            old = [path.name for path in self.path.glob("*.bin")]
            why = (f"it has {', '.join(old[:3])}; transformers' save_pretrained writes these",)
            what = f"{self.path} has no .safetensors files"
            raise CheckpointError(Mistake(what, why if old else ()))
        return found
