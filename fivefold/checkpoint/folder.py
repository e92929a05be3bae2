"""The folder of a run's checkpoints: names, what counts as a checkpoint, which are removed."""

import errno
import os
import re
import secrets
import shutil
from pathlib import Path
from shlex import quote

from fivefold.checkpoint.integrity import MANIFEST
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import temporary_paths, write_atomic

_LATEST = "latest"
_UNFINISHED = ".tmp"  # being written or being removed: not a checkpoint
_REPLACED = ".old"  # a complete checkpoint, valid while there is no other of its step


class CheckpointFolder:
    """Checkpoints by step.

    A checkpoint is written under a temporary name (`step-00000100.tmp`) and renamed when it is
    complete. An earlier checkpoint of the same step is renamed to `step-00000100.old` just before
    and removed just after, so that there is a complete checkpoint at every moment.

    Readers change nothing, and only the first rank of one run may write at a time.

    Args:
        path: path of the folder, which need not exist yet.
        keep_latest: number of checkpoints to keep, the most recently written; None: all.
        retain: checkpoints of multiples of this step stay, too; None: of none.
    """

    def __init__(
        self, path: Path, keep_latest: int | None = None, retain: int | None = None
    ) -> None:
        self.path = path
        self._keep_latest, self._retain = keep_latest, retain

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        folders = (path.name for path in self.path.glob("step-*") if path.is_dir())
        pattern = rf"step-([0-9]{{8}}|[1-9][0-9]{{8,}})({_REPLACED})?"
        found = (re.fullmatch(pattern, name) for name in folders)
        return sorted({int(match[1]) for match in found if match})

    def latest(self) -> int | None:
        """The step written last, or None if there is no checkpoint.

        Raises:
            CheckpointError: the file `latest` does not hold a number.
        """
        steps, pointer = self.steps(), self.path / _LATEST
        if not steps or not pointer.exists():
            return max(steps, default=None)
        text, found = "", "a folder"
        if not pointer.is_dir():
            text = pointer.read_bytes().decode(errors="replace")
            found = repr(text[:20])
        if not re.fullmatch(r"[0-9]{1,18}\n?", text):
            why = f"expected the number of a step, found {found}"
            works, path = tuple(str(step) for step in steps), quote(str(pointer))
            attempt = f"echo {steps[-1]} > {path}" if text else f"rm -r {path}"
            raise CheckpointError(Mistake(f"{pointer} is damaged", (why,), works, attempt))
        return int(text) if int(text) in steps else steps[-1]

    def of(self, step: int) -> Path:
        """The path of the checkpoint of a step, if there is one."""
        final, replaced = self._at(step), self._at(step, _REPLACED)
        return replaced if replaced.is_dir() and not final.is_dir() else final

    def unfinished(self, step: int) -> Path:
        """The temporary path to which the checkpoint of a step is written."""
        return self._at(step, _UNFINISHED)

    def clear(self) -> None:
        """Remove the remains of killed saves; restore a complete checkpoint that they renamed."""
        for unfinished in self.path.glob(f"step-*{_UNFINISHED}"):
            _delete(unfinished)
        for replaced in self.path.glob(f"step-*{_REPLACED}"):
            final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if final.is_dir() or not replaced.is_dir():
                _remove(replaced)
            else:
                _delete(final)
                replaced.rename(final)
        for pointer in temporary_paths(self.path, _LATEST):
            pointer.unlink()

    def put_in_place(self, step: int) -> None:
        """Make the complete checkpoint `unfinished(step)` the latest, and remove old ones."""
        final, replaced = self._at(step), self._at(step, _REPLACED)
        if os.path.lexists(final):
            final.rename(replaced)
        self.unfinished(step).rename(final)
        write_atomic(self.path / _LATEST, f"{step}\n")  # flushes the renames, too
        if os.path.lexists(replaced):
            _remove(replaced)
        if self._keep_latest is not None:
            others = [self.of(other) for other in self.steps() if other != step]
            others.sort(key=_written, reverse=True)
            for old in others[max(self._keep_latest - 1, 0) :]:
                if self._retain is None or step_of(old) % self._retain:
                    _remove(old)

    def _at(self, step: int, suffix: str = "") -> Path:
        return self.path / f"step-{step:08d}{suffix}"


def step_of(checkpoint: Path) -> int:
    """The step of a path returned by `CheckpointFolder.of`."""
    return int(checkpoint.name.removeprefix("step-").removesuffix(_REPLACED))


def _written(checkpoint: Path) -> int:
    """The time at which a checkpoint was completed, in ns; 0 if it is not complete."""
    manifest = checkpoint / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else 0


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; rename it first, so that a partly removed one is never used."""
    name = f"{checkpoint.name}-{secrets.token_hex(4)}"  # where an earlier one may still be
    _delete(checkpoint.rename(checkpoint.with_name(f"{name}{_UNFINISHED}")))


def _delete(path: Path) -> None:
    """Delete a path; of a link only the link, since its target is on another disk.

    NFS keeps files that somebody on this machine reads; the folder then stays, under a temporary
    name that later saves remove.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
