"""Reads weights in Megatron-core's distributed checkpoints (`--ckpt-format torch_dist`).

Neither the package is needed, nor is anything unpickled. Optimizer state is not read.
"""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.index import SavedTensor, read_foreign_index
from fivefold.checkpoint.matching import mismatches
from fivefold.checkpoint.pickled import read_foreign_pickle
from fivefold.checkpoint.reader import fill
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.megatron import unlike
from fivefold.config.model import ModelConfig
from fivefold.convert.stored import Shape, Stored, stored_tensors
from fivefold.errors import CheckpointError, Mistake
from fivefold.mesh.slices import Piece

COMMON = "common.pt"
_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_FUSED = MappingProxyType(
    {
        ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
        ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
    }
)
"""Norms that Transformer Engine fuses with the linear layers behind them, and their names then."""
_STACK = "decoder.layers."
_DTYPES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
)


@dataclass
class MegatronFolder:
    """The weights of a checkpoint, each layer by itself, read by slices.

    Layers of one kind lie in one tensor with a leading dim of layers; here each is a tensor.

    Attributes:
        path: the folder.
    """

    path: Path
    _index: Mapping[str, SavedTensor] = field(init=False)
    _where: dict[str, tuple[str, int | None]] = field(init=False)

    def __post_init__(self) -> None:
        index = read_foreign_index(self.path)
        self._index = {n: saved for n, saved in index.items() if not _OF_OPTIMIZER.match(n)}
        self._where = {}
        for actual, saved in self._index.items():
            name = actual
            for alone, fused in _FUSED.items():
                name = name.replace(alone, fused)
            inner = name.removeprefix(_STACK)
            if inner == name or inner.split(".")[0].isdecimal():
                self._where[name] = (actual, None)
                continue
            layers = saved.shape[0] if saved.shape else 0
            if layers > MAX_LAYERS:
                raise CheckpointError(f"{self.path} has {layers:,} layers in {actual}")
            for layer in range(layers):
                self._where[f"{_STACK}{layer}.{inner}"] = (actual, layer)

    @property
    def names(self) -> set[str]:
        """Its weights."""
        return {*self._where}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the run that saved it, as far as they are told.

        Raises:
            CheckpointError: its common.pt cannot be read.
        """
        try:
            with zipfile.ZipFile(self.path / COMMON) as archive:
                (inside,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                if archive.getinfo(inside).compress_type != zipfile.ZIP_STORED:
                    raise ValueError("torch compresses nothing")
                common = read_foreign_pickle(archive.read(inside))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, CheckpointError) as error:
            raise CheckpointError(f"{self.path / COMMON} cannot be read: {error}") from None
        told = common.get("args") if isinstance(common, dict) else None
        return told if isinstance(told, dict) else {}

    def shape(self, name: str) -> Shape:
        """The shape of a weight."""
        actual, layer = self._where[name]
        return self._index[actual].shape[0 if layer is None else 1 :]

    def dtype(self, name: str) -> str:
        """The type of a weight's elements, as .safetensors files name it."""
        dtype = self._index[self._where[name][0]].dtype
        return _DTYPES.get(dtype, str(dtype))

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a weight.

        Raises:
            CheckpointError: its file cannot be read.
        """
        actual, layer = self._where[name]
        saved = self._index[actual]
        part = torch.empty([s.stop - s.start for s in slices], dtype=saved.dtype)
        whole, cut = part, slices
        if layer is not None:
            whole, cut = part[None], (slice(layer, layer + 1), *slices)
        try:
            fill(self.path, self._index, {actual: Piece(whole, torch.Size(saved.shape), cut)})
        except OSError as error:
            raise CheckpointError(f"{self.path} does not give {name}: {error}") from None
        return part

    def places(self, model: ModelConfig) -> dict[str, Stored]:
        """Where each tensor of a model lies, checked: names, shapes and arguments agree.

        Raises:
            CheckpointError: it is of another model, or of one that Megatron-core has not, or whose
                tensors are not read here.
        """
        _see_kind(model)
        told = self.arguments
        if wrong := unlike(model, told):
            raise CheckpointError(str(Mistake(f"{self.path} is of another model", tuple(wrong))))
        places = {
            name: self._in_parts(name, self._padded(place, model, told))
            for name, place in stored_tensors("megatron", model).items()
        }
        asked = {name: place.their_shape for place in places.values() for name in place.names}
        saved = {name: self.shape(name) for name in self._where}
        if wrong_ones := mismatches(asked, saved, ()):
            first, *others = map(str, wrong_ones)
            raise CheckpointError("\n".join([f"{self.path}: {first}", *others]))
        return places

    def _padded(self, place: Stored, model: ModelConfig, told: Mapping[str, Any]) -> Stored:
        """The vocabulary with the rows that it has there, which are padded for their tp."""
        (name,) = place.names
        if place.of != model.vocab_size or name not in self._where:
            return place
        rows, vocabulary = self.shape(name)[0], model.vocab_size
        multiple = told.get("make_vocab_size_divisible_by")
        if type(multiple) is not int or multiple < 1:
            multiple = model.make_vocab_size_divisible_by
        tp = told.get("tensor_model_parallel_size")
        degrees = [tp] if type(tp) is int and tp > 0 else [1 << power for power in range(7)]
        steps = [1, *(multiple * degree for degree in degrees)]  # 1: not padded
        if rows not in {-(-vocabulary // step) * step for step in steps}:
            return place  # another vocabulary, which is told as another shape
        return replace(place, of=rows)

    def _in_parts(self, name: str, place: Stored) -> Stored:
        """Gate, up and experts as tensors of their own, where a checkpoint has them so."""
        (there,) = place.names
        if there in self._where:
            return place
        by_expert = ".experts." in name and len(place.shape) > 1
        of_one = [there]
        if by_expert:
            experts = range(place.shape[0])
            of_one = [there.replace(".experts.experts.", f".experts.experts.{e}.") for e in experts]
        half = "_w" if ".gate_proj." in name else "_v" if ".up_proj." in name else ""
        if half and of_one[0] + half in self._where:
            of_one = [part + half for part in of_one]
            place = replace(place, rows=None, of=None)
        if of_one[0] not in self._where:
            return place
        return replace(place, names=tuple(of_one), by_expert=by_expert)


def _see_kind(model: ModelConfig) -> None:
    wrong = [
        what
        for what, there in (
            ("multi_latent_attention", model.multi_latent_attention),
            ("mtp_num_layers", model.mtp_num_layers > 0),
            ("parallel_residual", model.parallel_residual),
        )
        if there
    ]
    if wrong:
        what = f"Megatron-core's checkpoints are read without {', '.join(wrong)}"
        raise CheckpointError(str(Mistake(what, attempt="a Hugging Face folder of the model")))
