"""Saves and loads checkpoints atomically; any layout can load any of them."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fivefold.checkpoint.folder import CheckpointFolder, step_of
from fivefold.checkpoint.index import SavedTensor, read_index
from fivefold.checkpoint.integrity import (
    INDEX,
    MANIFEST,
    META,
    complete,
    find_faults,
    read_manifest,
    stamps,
)
from fivefold.checkpoint.matching import check_histories, check_optimizers, check_types, mismatches
from fivefold.checkpoint.reader import fill
from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.team import DiskFullError, Team
from fivefold.checkpoint.writer import PieceSavePlanner, PieceWriter
from fivefold.errors import CheckpointError, DamagedCheckpoint, Mistake
from fivefold.files import disk_full, free_bytes, read_json, write_atomic
from fivefold.mesh.groups import new_group
from fivefold.mesh.slices import Piece, as_piece, as_pieces
from fivefold.model.eight_bit.rules import SCALES

_HEADER = 1_800  # least bytes added to each tensor by torch.save and by the index
LOAD_STEP = "--ckpt-step"

T = TypeVar("T")
Tensors = Mapping[str, Tensor | Piece]


class Checkpointer:
    """The checkpoints of one folder.

    On disk: `step-00000100/` with DCP's files, `meta.json` and `manifest.json`, and a file `latest`
    with the number of the step; `CheckpointFolder` keeps these complete at all times.

    The constructor and all methods but `steps` and `latest` are collective over the group.

    One class because saving and loading share the folder, the group and the save under way; the
    work itself is in `folder`, `team`, `index`, `integrity`, `reader` and `writer`.

    Args:
        folder: folder of the checkpoints; the first save creates it.
        keep_latest: number of checkpoints to keep, the most recently written; None: all.
        retain: checkpoints of multiples of this step stay, too; None: of none.
        async_save: whether `save` only copies to the CPU, and a thread writes the files.
        step_flag: flag by which the user's command chooses a step; error messages suggest it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_latest: int | None = None,
        retain: int | None = None,
        async_save: bool = False,
        step_flag: str = LOAD_STEP,
    ) -> None:
        self.folder = Path(folder)
        self._step_flag = step_flag
        self._checkpoints = CheckpointFolder(self.folder, keep_latest, retain)
        self._team = Team(new_group(backend="gloo") if dist.is_initialized() else None)
        self._async = async_save
        self._staging = Staging()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        return self._checkpoints.steps()

    def latest(self) -> int | None:
        """The step written last, or None if there is no checkpoint.

        Raises:
            CheckpointError: the file `latest` does not hold a number.
        """
        return self._checkpoints.latest()

    def save(self, step: int, tensors: Tensors, meta: Mapping[str, Any]) -> None:
        """Save, replacing a checkpoint of the same step.

        With `async_save` the caller may change the tensors as soon as this returns; it first waits
        for an earlier save. Free disk space is checked before it returns in either case.

        Args:
            step: number of completed optimizer steps.
            tensors: tensors of this rank by global name; replicas are written once.
            meta: values that JSON can hold; those of the first rank are saved.

        Raises:
            CheckpointError: the disk is too full, this save failed, or, with `async_save`, the
                save before it failed.
        """
        self.wait()
        text = json.dumps(meta, indent=1)
        pieces = as_pieces(tensors)
        needed = self._make_room(step, pieces)
        if self._async:
            pieces = self._staging.copy(pieces)
            gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._writing = self._pool.submit(self._write_on, gpu, step, pieces, text, needed)
        else:
            self._write(step, pieces, text, needed)

    def agree(self, work: Callable[[], T]) -> T:
        """The first rank's result of `work`, on every rank; waits for a save in progress."""
        self.wait()
        return self._team.leader("agreeing", work)

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed; ranks may learn of it at different times.

        `wait` then raises the error. This property is not collective: ranks must agree before they
        act on it.
        """
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def wait(self) -> None:
        """Wait until nothing is being written; call it before the process ends.

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

        Checksums, names and shapes are checked before anything is changed. Values are converted if
        the types differ. Delayed scales of 8-bit operands stay as they are if it has none, and are
        left out if the model has none.

        Args:
            step: step to load; None: the latest.
            tensors: tensors of this rank by global name.
            skip: prefixes of names in the checkpoint that need not be loaded, such as "optim." to
                load weights only.

        Raises:
            DamagedCheckpoint: on every rank, if files are not what was written.
            CheckpointError: on every rank, if there is no such checkpoint, or it is of another
                model or optimizer, or optimizer state here has fewer bits than it has, or delayed
                scales have histories of another length.
        """
        folder, index = self.open(step)
        pieces = {
            name: as_piece(tensor)
            for name, tensor in tensors.items()
            if name in index or not name.startswith(SCALES)
        }
        check_optimizers(pieces, index)
        check_types({name: p.local.dtype for name, p in pieces.items()}, index)
        check_histories({name: p.shape for name, p in pieces.items()}, index)
        self._check_names(folder, index, pieces, (*skip, SCALES))
        meta = self._read_meta(folder)
        self._team.each(f"loading {folder}", lambda: fill(folder, index, pieces))
        return meta

    def open(self, step: int | None) -> tuple[Path, dict[str, SavedTensor]]:
        """The folder of a checkpoint, the latest if None, and its tensors, for `reader.fill`.

        Raises:
            CheckpointError: on every rank, if there is no such checkpoint, or it is damaged.
        """
        folder = self._find(step)
        if faults := find_faults(folder, self._team):
            raise self._damaged(folder, faults)
        job = f"reading {folder}"
        return folder, self._team.each(job, lambda: read_index(folder, read_manifest(folder)))

    def filling(self, step: int | None) -> Callable[[Mapping[str, Piece]], None]:
        """A function that fills pieces of some tensors of a checkpoint by name; arguments as in
        `load`."""
        return partial(fill, *self.open(step))

    def load_by(
        self, job: str, tensors: Tensors, work: Callable[[Mapping[str, Piece]], None]
    ) -> None:
        """Let `work` fill this rank's pieces of tensors from elsewhere, and agree on how that
        ended.

        Raises:
            CheckpointError: on every rank, if `job` ("loading weights") failed on one.
        """
        pieces = as_pieces(tensors)
        self._team.each(job, lambda: work(pieces))

    def find(self, step: int | None) -> int:
        """The step that `load` and `read_meta` would take: `step`, or the latest if None.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        return step_of(self._find(step))

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The meta of a checkpoint, the latest if None; its tensors are neither read nor checked.

        Raises:
            DamagedCheckpoint: its meta is damaged.
            CheckpointError: there is no such checkpoint.
        """
        folder = self._find(step)
        if faults := find_faults(folder, self._team, META):
            raise self._damaged(folder, faults)
        return self._read_meta(folder)

    def _make_room(self, step: int, pieces: dict[str, Piece]) -> int:
        """Remove the remains of killed saves, check the free disk space, return bytes needed."""
        job = f"saving step {step} to {self.folder}"
        # Ranks with the first element of a tensor report its size; the dict merges replicas.
        own = {
            name: prod(piece.shape) * piece.local.element_size() + _HEADER
            for name, piece in pieces.items()
            if all(part.start == 0 for part in piece.slices)
        }
        sizes = {
            n: size for sizes in self._team.together(job, lambda: own) for n, size in sizes.items()
        }
        needed = sum(sizes.values())

        def free() -> int | None:
            self._checkpoints.clear()
            return free_bytes(self.folder)

        available = self._team.leader(job, free)
        if available is not None and available < needed:
            raise self._disk_full(job, needed)
        return needed

    def _write_on(self, gpu: int | None, *arguments: Any) -> None:
        """`_write` in a thread, on this rank's device: a thread would default to the first one."""
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self._write(*arguments)

    def _write(self, step: int, pieces: dict[str, Piece], meta: str, needed: int) -> None:
        """Write a whole checkpoint to a temporary folder, then move it into place."""
        job = f"saving step {step} to {self.folder}"
        unfinished = self._checkpoints.unfinished(step)
        try:
            self._write_files(job, unfinished, pieces, meta)
            self._team.leader(job, lambda: self._checkpoints.put_in_place(step))
        except CheckpointError as error:
            self._team.leader(job, lambda: shutil.rmtree(unfinished, ignore_errors=True))
            if isinstance(error, DiskFullError):
                raise self._disk_full(job, needed, error) from None
            raise

    def _write_files(self, job: str, folder: Path, pieces: dict[str, Piece], meta: str) -> None:
        """Write the files of a checkpoint to a new folder, the manifest last."""

        def write() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")  # known, when alone
                group = self._team.group
                how = {"storage_writer": PieceWriter(folder), "planner": PieceSavePlanner()}
                dcp.save(dict(pieces), process_group=group, no_dist=group is None, **how)

        def measure() -> dict:
            names = [path.name for path in folder.glob(f"__{self._team.rank}_*")]
            if self._team.rank == 0:
                write_atomic(folder / META, meta)
                names += [INDEX, META]
            return stamps(folder, names)

        def begin() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder.mkdir()

        self._team.leader(job, begin)
        self._team.each(job, write)
        measured = self._team.together(job, measure)
        files = {name: stamp for stamps_ in measured for name, stamp in stamps_.items()}
        self._team.leader(job, lambda: complete(folder, files))

    def _disk_full(
        self, job: str, needed: int, failure: CheckpointError | None = None
    ) -> CheckpointError:
        """The error to raise when the disk is full, with the sizes; collective."""

        def tell() -> Mistake:
            kept = None
            with suppress(CheckpointError, OSError):  # a bad `latest` matters less than this
                kept = self.latest()
            why = [line.strip() for line in str(failure).splitlines()[1:]] if failure else []
            goes_on = "" if kept is None else f": it goes on from the checkpoint of step {kept}"
            what = f"{job} failed"
            return disk_full(what, self.folder, *why, needed=needed, goes_on=goes_on)

        return CheckpointError(self._team.leader(job, tell))

    def _read_meta(self, folder: Path) -> dict[str, Any]:
        path = folder / META
        return self._team.leader(
            f"reading {path}", lambda: read_json(path, dict[str, Any], CheckpointError)
        )

    def _check_names(
        self,
        folder: Path,
        index: Mapping[str, SavedTensor],
        pieces: dict[str, Piece],
        skip: tuple[str, ...],
    ) -> None:
        by_rank = self._team.together(
            f"reading {folder}", lambda: {name: tuple(p.shape) for name, p in pieces.items()}
        )
        asked = {name: shape for shapes in by_rank for name, shape in shapes.items()}

        saved = {name: tensor.shape for name, tensor in index.items()}
        if mistakes := mismatches(asked, saved, skip):
            raise CheckpointError(f"{folder} is of another model", *mistakes)

    def _find(self, step: int | None) -> Path:
        """The folder of a step, the latest if None; waits for a save under way first."""
        self.wait()

        def find() -> Path | Mistake:
            wanted = self.latest() if step is None else step
            if wanted is not None and self._checkpoints.of(wanted).is_dir():
                return self._checkpoints.of(wanted)
            return self._absent(step)

        found = self._team.leader(f"looking into {self.folder}", find)
        if isinstance(found, Mistake):
            raise CheckpointError(found)
        return found

    def _absent(self, step: int | None) -> Mistake:
        if (self.folder / MANIFEST).exists() and re.fullmatch(r"step-[0-9]+", self.folder.name):
            what = f"{self.folder} is one checkpoint, not a folder of them"
            whole, own = quote(str(self.folder.parent)), step_of(self.folder)
            return Mistake(what, attempt=f"--load {whole} --ckpt-step {own}")
        if not (steps := self.steps()):
            return Mistake(f"there is no checkpoint in {self.folder}")
        return Mistake(
            f"there is no checkpoint of step {step} in {self.folder}",
            works=tuple(f"{self._step_flag} {s}" for s in steps),
        )

    def _damaged(self, folder: Path, faults: list[str]) -> DamagedCheckpoint:
        """The error to raise for a damaged checkpoint, with an intact one to load; collective."""
        steps = self._team.leader(f"looking into {self.folder}", self.steps)
        others = [step for step in reversed(steps) if self._checkpoints.of(step) != folder]
        intact = next(
            (s for s in others if not find_faults(self._checkpoints.of(s), self._team)), None
        )
        if intact is None:
            why, attempt = f"no other checkpoint in {self.folder} is intact", None
        else:
            why = f"the checkpoint of step {intact} is intact"
            attempt = f"{self._step_flag} {intact}"
            if self._step_flag == LOAD_STEP:
                there = quote(str(self.folder))
                attempt = f"load it with --load {there} {attempt} and another --save"
        what = f"{folder} is damaged"
        return DamagedCheckpoint(Mistake(what, (*faults, why), (), attempt), intact)
