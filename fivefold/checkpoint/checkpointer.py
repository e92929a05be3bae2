"""Saves and loads checkpoints; each is complete or not there, and of no particular layout."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fivefold.checkpoint.integrity import MANIFEST, find_faults, stamps, write_manifest
from fivefold.checkpoint.matching import mismatches
from fivefold.checkpoint.planners import PieceLoadPlanner, PieceSavePlanner
from fivefold.checkpoint.team import Team
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import write_atomic
from fivefold.mesh.slices import Piece, piece_of

_META = "meta.json"
_LATEST = "latest"
_UNFINISHED = ".tmp"

Tensors = Mapping[str, Tensor | Piece]


class Checkpointer:
    """The checkpoints of one folder.

    On disk: `step-00000100/` with DCP's files, `meta.json` and `manifest.json`, and a file `latest`
    with the number of the step. A checkpoint is written beside its place and renamed when it is
    complete.

    The constructor and all methods but `steps` and `latest` are collective over the group.

    Args:
        folder: where the checkpoints lie; created by the first save.
        keep_latest: how many to keep, the most recently written; None: all.
        async_save: `save` copies to the CPU and returns; writing goes on in a thread.
        process_group: ranks that save and load together, used by nothing else meanwhile; gloo.
            None: a new gloo group of all ranks, or this process alone if torch.distributed is
            not initialised.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_latest: int | None = None,
        async_save: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._keep_latest = keep_latest
        if process_group is None and dist.is_initialized():
            process_group = dist.new_group(backend="gloo")
        self._team = Team(process_group)
        self._async = async_save
        self._staged: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """The step written last, or None if there is no checkpoint."""
        steps = self.steps()
        try:
            step = int((self.folder / _LATEST).read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            step = -1
        return step if step in steps else max(steps, default=None)

    def save(self, step: int, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        """Save, replacing a checkpoint of the same step.

        With `async_save` the caller may change the tensors at once; an earlier save that still
        writes is waited for.

        Args:
            step: number of completed optimizer steps.
            tensors: this rank's, by global name; replicas are written once.
            meta: what JSON can hold; that of the first rank is kept.

        Raises:
            CheckpointError: this save failed, or the one before when `async_save`.
        """
        self.wait()
        text = json.dumps(meta, indent=1)
        pieces = {name: _as_piece(tensor) for name, tensor in tensors.items()}
        if self._async:
            pieces = self._stage(pieces)
            self._writing = self._pool.submit(self._write, step, pieces, text)
        else:
            self._write(step, pieces, text)

    def wait(self) -> None:
        """Return when nothing is being written; call it before the process ends.

        Raises:
            CheckpointError: the save that was under way failed.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def load(
        self, step: int | None, tensors: Tensors, *, skip: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Fill tensors in place from a checkpoint of any layout, and return its meta.

        Checksums, names and shapes are checked before anything is changed. Types may differ:
        values are converted.

        Args:
            step: None for the latest.
            tensors: this rank's, by global name.
            skip: prefixes of names that the checkpoint may have though no rank asks for them, such
                as "optim." to load weights only.

        Raises:
            CheckpointError: on every rank: there is no such checkpoint, it is damaged, or it is
                of another model.
        """
        self.wait()
        folder = self._find(step)
        if faults := find_faults(folder, self._team):
            raise self._damaged(folder, faults)
        pieces = {name: _as_piece(tensor) for name, tensor in tensors.items()}
        self._check_names(folder, pieces, skip)
        meta = self._read_meta(folder)
        self._team.together(f"loading {folder}", lambda: self._read(folder, pieces))
        return meta

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The meta of a checkpoint, the latest if None, without its tensors or their checks.

        Raises:
            CheckpointError: there is no such checkpoint, or its meta cannot be read.
        """
        self.wait()
        return self._read_meta(self._find(step))

    def _write(self, step: int, pieces: dict[str, Piece], meta: str) -> None:
        """Write all of a checkpoint, then put it in its place."""
        job = f"saving step {step} to {self.folder}"
        final = self._path(step)
        unfinished = final.with_name(final.name + _UNFINISHED)

        def clear() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(f"step-*{_UNFINISHED}"):
                shutil.rmtree(left_over)
            unfinished.mkdir()

        def write() -> None:
            writer = dcp.FileSystemWriter(unfinished)
            self._dcp(dcp.save, pieces, storage_writer=writer, planner=PieceSavePlanner())

        def measure() -> dict:
            names = [path.name for path in unfinished.glob(f"__{self._team.rank}_*")]
            if self._team.rank == 0:
                write_atomic(unfinished / _META, meta)
                names += [".metadata", _META]
            return stamps(unfinished, names)

        self._team.leader(job, clear)
        self._team.together(job, write)
        measured = self._team.together(job, measure)

        def finish() -> None:
            write_manifest(unfinished, {name: s for files in measured for name, s in files.items()})
            replaced = _set_aside(final) if final.exists() else None
            unfinished.rename(final)
            write_atomic(self.folder / _LATEST, f"{step}\n")
            if replaced is not None:
                shutil.rmtree(replaced)
            self._discard_old(step)

        self._team.leader(job, finish)

    def _read_meta(self, folder: Path) -> dict[str, Any]:
        path = folder / _META
        return self._team.leader(f"reading {path}", lambda: json.loads(path.read_bytes()))

    def _read(self, folder: Path, pieces: dict[str, Piece]) -> None:
        reader = dcp.FileSystemReader(folder)
        self._dcp(dcp.load, pieces, storage_reader=reader, planner=PieceLoadPlanner())

    def _dcp(self, operation: Callable, pieces: dict[str, Piece], **settings: Any) -> None:
        group = self._team.group
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # that we know, when alone
            operation(dict(pieces), process_group=group, no_dist=group is None, **settings)

    def _stage(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        """Copies on the CPU, in memory that is kept for the next save."""
        staged = {}
        for name, piece in pieces.items():
            local, copy = piece.local, self._staged.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._staged[name] = copy
            staged[name] = piece.like(copy.copy_(local, non_blocking=local.is_cuda))
        if any(piece.local.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return staged

    def _discard_old(self, current: int) -> None:
        if self._keep_latest is None:
            return
        others = [self._path(step) for step in self.steps() if step != current]
        others.sort(key=_written, reverse=True)
        for old in others[max(self._keep_latest - 1, 0) :]:
            shutil.rmtree(_set_aside(old))

    def _check_names(self, folder: Path, pieces: dict[str, Piece], skip: tuple[str, ...]) -> None:
        by_rank = self._team.together(
            f"reading {folder}", lambda: {name: tuple(p.shape) for name, p in pieces.items()}
        )
        asked = {name: shape for shapes in by_rank for name, shape in shapes.items()}

        def compare() -> list[Mistake]:
            saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            shapes = {
                name: tuple(tensor.size)
                for name, tensor in saved.items()
                if isinstance(tensor, TensorStorageMetadata)
            }
            return mismatches(asked, shapes, skip)

        if mistakes := self._team.leader(f"reading {folder}", compare):
            lines = "\n".join(str(mistake) for mistake in mistakes)
            raise CheckpointError(f"{folder} is of another model\n{lines}")

    def _find(self, step: int | None) -> Path:
        """The folder of a step, the latest if None."""

        def find() -> Path | Mistake:
            wanted = self.latest() if step is None else step
            if wanted is not None and self._path(wanted).is_dir():
                return self._path(wanted)
            return self._absent(step)

        found = self._team.leader(f"looking into {self.folder}", find)
        if isinstance(found, Mistake):
            raise CheckpointError(str(found))
        return found

    def _absent(self, step: int | None) -> Mistake:
        if (self.folder / MANIFEST).exists():
            return Mistake(
                f"{self.folder} is one checkpoint, not a folder of them",
                attempt=f"--load {self.folder.parent} --ckpt-step {_step(self.folder)}",
            )
        if not (steps := self.steps()):
            return Mistake(f"there is no checkpoint in {self.folder}")
        return Mistake(
            f"there is no checkpoint of step {step} in {self.folder}",
            works=tuple(f"--ckpt-step {s}" for s in steps),
        )

    def _damaged(self, folder: Path, faults: list[str]) -> CheckpointError:
        """The error to raise, with the best checkpoint to load instead; collective."""
        steps = self._team.leader(f"looking into {self.folder}", self.steps)
        others = [step for step in reversed(steps) if self._path(step) != folder]
        intact = next((s for s in others if not find_faults(self._path(s), self._team)), None)
        if intact is None:
            why, attempt = f"no other checkpoint in {self.folder} is intact", None
        else:
            why = f"the checkpoint of step {intact} is intact"
            attempt = f"load it with --load {self.folder} --ckpt-step {intact} and another --save"
        return CheckpointError(str(Mistake(f"{folder} is damaged", (*faults, why), (), attempt)))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"


def _as_piece(tensor: Tensor | Piece) -> Piece:
    return tensor if isinstance(tensor, Piece) else piece_of(tensor)


def _written(checkpoint: Path) -> int:
    """When it was completed, in ns; 0 if it never was."""
    manifest = checkpoint / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else 0


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _set_aside(checkpoint: Path) -> Path:
    """Rename it, before it is removed, so that no half of one is ever taken for one."""
    aside = checkpoint.with_name(f"{checkpoint.name}.old{_UNFINISHED}")
    return checkpoint.rename(aside)
