"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Paths to write instead of the targets, which they replace, in order, if the block succeeds.

    They lie in a folder of their own beside the first target: on the same file system, and apart
    from what another process, on this machine or another, may be writing at the same time.
    """
    first = targets[0]
    with tempfile.TemporaryDirectory(prefix=f".{first.name}.", dir=first.parent) as folder:
        parts = [Path(folder, target.name) for target in targets]
        yield parts
        for part, target in zip(parts, targets, strict=True):
            os.replace(part, target)
