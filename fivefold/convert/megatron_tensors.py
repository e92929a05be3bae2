"""Tensors of Megatron-core's distributed checkpoints, one for each layer, read by slices."""

from collections.abc import Collection, Mapping
from itertools import product
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from fivefold.checkpoint.index import SavedTensor
from fivefold.checkpoint.reader import fill
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.convert.stored import Shape
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import Piece

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


class MegatronTensors:
    """The weights of a checkpoint, or one state of its optimizer, by the names of the weights.

    Layers of one kind lie in one tensor with a leading dim of layers; here each is a tensor.

    Args:
        path: folder of the checkpoint.
        index: its tensors, by the names of the weights.

    Raises:
        CheckpointError: there are more layers than any model has.
    """

    def __init__(self, path: Path, index: Mapping[str, SavedTensor]) -> None:
        self.path, self._index = path, index
        self._where: dict[str, tuple[str, int | None]] = {}
        for actual, saved in index.items():
            name = actual
            for alone, fused in _FUSED.items():
                name = name.replace(alone, fused)
            inner = name.removeprefix(_STACK)
            if inner == name or inner.split(".")[0].isdecimal():
                self._where[name] = (actual, None)
                continue
            layers = saved.shape[0] if saved.shape else 0
            if layers > MAX_LAYERS:
                raise CheckpointError(f"{path} has {layers:,} layers in {actual}")
            for layer in range(layers):
                self._where[f"{_STACK}{layer}.{inner}"] = (actual, layer)

    @property
    def names(self) -> Collection[str]:
        """The names of the weights for which it has something."""
        return self._where.keys()

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        actual, layer = self._where[name]
        return self._index[actual].shape[0 if layer is None else 1 :]

    def dtype(self, name: str) -> str:
        """The type of a tensor's elements, as .safetensors files name it."""
        dtype = self._index[self._where[name][0]].dtype
        return _DTYPES.get(dtype, str(dtype))

    @property
    def widest(self) -> torch.dtype:
        """The type with the most bits among its tensors."""
        return max((saved.dtype for saved in self._index.values()), key=lambda t: t.itemsize)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor.

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


class StateTensors(MegatronTensors):
    """One optimizer state, in the shapes of the weights or in flattened parts of them.

    Releases before 0.14 (`fully_sharded_model_space`) flattened the part of a weight that a rank
    had: of a weight [R, C] in r x c parts, state is stored as [r, c, R/r * C/c].

    Args:
        path: folder of the checkpoint.
        index: its tensors, by the names of the weights.
        weights: the weights.
    """

    def __init__(
        self, path: Path, index: Mapping[str, SavedTensor], weights: MegatronTensors
    ) -> None:
        super().__init__(path, index)
        self._weights = weights

    def shape(self, name: str) -> Shape:
        """The shape of a tensor; that of the weight where it is in flattened parts."""
        stored = super().shape(name)
        if name not in self._weights.names:
            return stored
        whole = self._weights.shape(name)
        in_parts = len(stored) == len(whole) + 1 and prod(stored) == prod(whole)
        divides = all(size % n == 0 for size, n in zip(whole, stored, strict=False) if n)
        return whole if in_parts and divides else stored

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor.

        Raises:
            CheckpointError: its file cannot be read.
        """
        stored, whole = super().shape(name), self.shape(name)
        if stored == whole:
            return super().read(name, slices)
        sizes = [size // n for size, n in zip(whole, stored[:-1], strict=True)]
        found = torch.empty(
            [s.stop - s.start for s in slices], dtype=self._index[self._where[name][0]].dtype
        )
        parts = (range(s.start // n, -(-s.stop // n)) for s, n in zip(slices, sizes, strict=True))
        for place in product(*parts):
            there, here = list[slice](), list[slice]()
            for at, size, cut in zip(place, sizes, slices, strict=True):
                start, stop = max(cut.start, at * size), min(cut.stop, (at + 1) * size)
                there.append(slice(start - at * size, stop - at * size))
                here.append(slice(start - cut.start, stop - cut.start))
            row = prod(sizes[1:])
            flat = slice(there[0].start * row, there[0].stop * row)
            read = super().read(name, (*(slice(at, at + 1) for at in place), flat))
            found[tuple(here)] = read.view(-1, *sizes[1:])[(slice(None), *there[1:])]
        return found
