"""Reads parts of tensors in .safetensors files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fivefold.convert.stored import Shape
from fivefold.errors import CheckpointError
from fivefold.files import unread_tensors


@dataclass
class TensorFiles:
    """The tensors of several files, each read by slices.

    Attributes:
        folder: folder that messages name.
        files: the file of each tensor.
    """

    folder: Path
    files: Mapping[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict, init=False)

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The type of a tensor's elements, as the files name it."""
        return str(self.slice(name).get_dtype())

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor.

        Raises:
            CheckpointError: its file cannot be read.
        """
        with self._telling(name):
            part: Tensor = self.slice(name)[slices]
        return part

    def slice(self, name: str) -> Any:
        """safetensors' view of a tensor, before anything is read."""
        from safetensors import safe_open

        file = self.files[name]
        with self._telling(name):
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_slice(name)

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (SafetensorError, OSError) as error:
            unread = unread_tensors(self.files[name], error)
            what, why = f"{self.folder} does not give {name}", (unread.what, *unread.why)
            raise CheckpointError(replace(unread, what=what, why=why)) from None
