"""Small checkpoints, and changes to them that their checksums do not give away."""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.checkpointer import Checkpointer


def tensors(value: float = 0.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.full((30, 20), value),
        "b.weight": torch.full((7,), value),
        "optim.exp_avg.b.weight": torch.full((7,), value),
    }


def folder_with(root: Path, *steps: int) -> Path:
    checkpointer = Checkpointer(root)
    for step in steps:
        checkpointer.save(step, tensors(float(step)), {"step": step})
    return root


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def forge(checkpoint: Path, name: str, data: bytes) -> None:
    """Change a file of a checkpoint, and its manifest so that it agrees."""
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["files"][name] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


class Call:
    """Is unpickled by calling something, and perhaps given a state then."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments, state)

    def __reduce__(self) -> tuple:
        return self.reduced

    def __call__(self) -> None:
        """Never called: pickle wants what it will call to be callable already."""
