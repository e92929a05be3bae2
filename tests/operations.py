"""Names the operations of torch that the program calls, and that this torch does not know.

    python -m tests.operations

torch knows some of its operations only where a module of its own was imported. So each of ours that
calls others than those of `aten` is imported in a process that has imported torch alone.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed

ROOT = Path(__file__).resolve().parents[1]
CALLED = re.compile(r"\b(?:torch\.ops\.(\w+)|ATEN)\.(\w+)")
EVERYWHERE = ("aten", "prim")


def called() -> dict[str, set[tuple[str, str]]]:
    """Module -> namespace and name of the operations that it calls."""
    found: dict[str, set[tuple[str, str]]] = {}
    for file in sorted((ROOT / "fivefold").rglob("*.py")):
        names = {(each[1] or "aten", each[2]) for each in CALLED.finditer(file.read_text())}
        if names:
            found[".".join(file.relative_to(ROOT).with_suffix("").parts)] = names
    return found


def unknown() -> Iterator[str]:
    """Operations that are not known where they are called."""
    for module, names in called().items():
        here = {name for name in names if name[0] in EVERYWHERE}
        yield from _lacking(module, here)
        if names - here:
            with get_context("fork").Pool(1) as other:
                yield from other.apply(_lacking_with, (module, names - here))


def _lacking_with(module: str, names: set[tuple[str, str]]) -> list[str]:
    import_module(module)
    return _lacking(module, names)


def _lacking(module: str, names: set[tuple[str, str]]) -> list[str]:
    return [
        f"{module} calls {space}::{name}"
        for space, name in sorted(names)
        if not hasattr(getattr(torch.ops, space), name)
    ]


if __name__ == "__main__":
    raise SystemExit("\n".join(unknown()) or 0)
