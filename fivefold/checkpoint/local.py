"""Keeps the state of each rank in the memory of its host, and a copy on another host.

A file system in memory, such as /dev/shm, outlives a process that dies; the copy on another host
survives the loss of a host. These are Megatron-Core's local checkpoints
(`--non-persistent-ckpt-type local`) with replication.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint.staging import Staging
from fivefold.checkpoint.state_file import fill_from_state, read_state, state_damage, write_state
from fivefold.checkpoint.team import Team
from fivefold.errors import CheckpointError
from fivefold.files import atomic_path, caused_by_full_disk, disk_full
from fivefold.mesh.groups import new_group
from fivefold.mesh.slices import Piece, as_pieces

CHUNK = 1 << 28  # bytes of a message
_FILE = re.compile(r"rank-(\d{5,})-([0-9a-f]{16})\.safetensors")
_STEP = re.compile(r"step-(\d{8,})")
_LOST = -1  # the size of a file that could not be written


class LocalCheckpoints:
    """The latest two states of the ranks of one layout, which only that layout can load.

    On each host: `step-00000100/rank-00003-<layout>.safetensors`. All methods are collective.

    One class because saving, finding and loading share the folder, the group and the save under
    way.

    Args:
        folder: folder of this host, in its memory.
        host: name of this host.
        jump: how many ranks further the copy of a rank's state is kept; None: so many that it is
            another host; 0, or on the same host: there is no copy.

    Attributes:
        damage: why the latest `find` passed over a later state; empty if it did not.
    """

    def __init__(self, folder: Path, host: str, jump: int | None = None) -> None:
        self._folder = folder
        self._group = new_group(backend="gloo") if dist.is_initialized() else None
        self._team = Team(self._group)
        self._hosts = self._team.together("naming hosts", lambda: host)
        rank, size = self._team.rank, self._team.size
        jump = _jump_to_another(self._hosts) if jump is None else jump % size
        self._to, self._from = (rank + jump) % size, (rank - jump) % size
        self._staging = Staging()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._complete = 0
        # A step whose state every rank can get, and for each rank one whose host has its file.
        self._found: tuple[int, tuple[int, ...]] | None = None
        self.damage = ""

    def save(self, step: int, tensors: Mapping[str, Tensor | Piece], meta: Any) -> None:
        """Copy this rank's tensors, and write them while training goes on.

        Args:
            step: number of completed optimizer steps.
            tensors: all tensors that this rank needs to go on, by name.
            meta: values that JSON can hold.

        Raises:
            CheckpointError: on every rank, if the save before failed on one: memory was full.
        """
        self.wait()
        complete = min(self._team.together("saving in memory", lambda: self._complete))
        self._remove_all_but(complete, step)
        pieces = as_pieces(tensors)
        staged = self._staging.copy(pieces)
        self._writing = self._pool.submit(self._write, step, staged, json.dumps(meta))

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: on every rank, if the save under way failed on one.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            self._team.each(f"keeping states in {self._folder}", writing.result)

    def find(self, tensors: Mapping[str, Tensor | Piece]) -> int | None:
        """The latest step whose states of this layout every rank can get whole; None if there is
        none.

        `damage` then says which file of a later step was passed over.
        """
        own = _signature(as_pieces(tensors))
        job = f"looking into {self._folder}"
        everyones = self._team.together(job, lambda: (own, _listed(self._folder)))
        names = [_name(rank, signature) for rank, (signature, _) in enumerate(everyones)]
        steps = {step for _, files in everyones for step in files}
        self.damage = ""
        for step in sorted(steps, reverse=True):
            holders = self._whole(step, names, [files.get(step, set()) for _, files in everyones])
            if holders is not None:
                if self.damage:
                    self.damage += f"; step {step} is the latest that is whole there"
                self._found = step, holders
                return step
        return None

    def _whole(
        self, step: int, names: Sequence[str], held: Sequence[Set[str]]
    ) -> tuple[int, ...] | None:
        """For each rank's file, a rank whose host has it intact; None if any file is intact
        nowhere.

        Args:
            step: whose files are looked at.
            names: the file of each rank.
            held: names of the files on the host of each rank.
        """
        folder = self._folder / _folder(step)
        while (holders := _holders(names, held)) is not None:
            mine = [name for name, at in zip(names, holders, strict=True) if at == self._team.rank]
            faults = self._team.together(f"checking {folder}", lambda: _damages(folder, mine))  # noqa: B023
            if not any(faults):
                break
            on_host: dict[str, set[str]] = {}
            for host, fault in zip(self._hosts, faults, strict=True):
                on_host.setdefault(host, set()).update(fault)
            held = [files - on_host[host] for host, files in zip(self._hosts, held, strict=True)]
            self.damage = self.damage or next(text for f in faults for text in f.values())
        return holders

    def load(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Any]:
        """Fill tensors in place from the step that `find` returned, and return its meta.

        Raises:
            CheckpointError: on every rank, if a file is damaged.
        """
        assert self._found is not None
        (step, holders), rank = self._found, self._team.rank
        pieces = as_pieces(tensors)
        folder, own = self._folder / _folder(step), _signature(pieces)
        signatures = self._team.together("loading", lambda: own)
        for owner, holder in enumerate(holders):
            path = folder / _name(owner, signatures[owner])
            if owner != holder and rank == holder:
                _settle(self._start_send(path, path.stat().st_size, owner))
            elif owner != holder and rank == owner:
                self._receive(folder, owner, holder)
        self._complete = step
        job = f"loading step {step} from {self._folder}"
        path = folder / _name(rank, own)
        meta = self._team.each(job, lambda: read_state(path, pieces))  # before anything is changed
        self._team.each(job, lambda: fill_from_state(path, pieces))
        return meta

    def remove(self) -> None:
        """Remove this rank's states, since the run is saved elsewhere."""
        self.wait()
        self._remove_all_but()
        with suppress(OSError):  # other ranks still have files there
            self._folder.rmdir()

    def _write(self, step: int, pieces: dict[str, Piece], meta: str) -> None:
        path = self._folder / _folder(step) / _name(self._team.rank, _signature(pieces))
        size, problem = _LOST, None
        try:
            write_state(path, pieces, meta)
            size = path.stat().st_size
        except Exception as error:  # the neighbour still waits for a size, so fail only later
            problem = error
        self._exchange(path, size)
        if problem is not None:
            if (full := caused_by_full_disk(problem)) is not None:
                needed = sum(p.local.numel() * p.local.element_size() for p in pieces.values())
                full_disk = disk_full(
                    "keeping states in memory failed", self._folder, needed=needed
                )
                raise CheckpointError(full_disk) from full
            raise problem
        self._complete = step

    def _exchange(self, path: Path, size: int) -> None:
        """Send this rank's file to the rank that keeps its copy, and keep that of another."""
        sends = self._hosts[self._to] != self._hosts[self._team.rank]
        keeps = self._hosts[self._from] != self._hosts[self._team.rank]
        works = self._start_send(path, size, self._to) if sends else []
        try:
            if keeps:
                self._receive(path.parent, self._from, self._from)
        finally:
            _settle(works)

    def _start_send(self, path: Path, size: int, to: int) -> list[dist.Work | None]:
        """Start sending a file, of `_LOST` bytes if there is none: first its size and signature."""
        pieces = [torch.tensor([size, int(path.name[-28:-12], 16) - (1 << 63)])]
        if size > 0:
            data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            pieces += data.split(CHUNK)
        return [dist.isend(piece, group=self._group, group_dst=to) for piece in pieces]

    def _receive(self, folder: Path, owner: int, source: int) -> None:
        """Write the file that another rank sends; receive all of it even if it cannot be written.

        Raises:
            CheckpointError: there is none.
        """
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, group=self._group, group_src=source)
        size, signature = header.tolist()
        if size == _LOST:
            raise CheckpointError(f"rank {owner} could not keep its state")
        parts = self._incoming(size, source)
        path = folder / _name(owner, f"{signature + (1 << 63):016x}")
        try:
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                for part in parts:
                    part.numpy().tofile(file)
        finally:
            for _ in parts:
                pass

    def _incoming(self, size: int, source: int) -> Iterator[Tensor]:
        buffer = torch.empty(min(size, CHUNK), dtype=torch.uint8)
        for start in range(0, size, CHUNK):
            part = buffer[: min(CHUNK, size - start)]
            dist.recv(part, group=self._group, group_src=source)
            yield part

    def _remove_all_but(self, *steps: int) -> None:
        """Remove this rank's files of other steps, and the copies it keeps for another rank."""
        folders: list[Path] = []
        with suppress(FileNotFoundError):
            folders = [*self._folder.glob("step-*")]
        # Files being written when a rank died; safetensors has temporary names of its own.
        patterns = [".tmp*", *(f"rank-{rank:05d}-*" for rank in {self._team.rank, self._from})]
        for folder in folders:
            if folder.name in map(_folder, steps):
                continue
            with suppress(OSError):  # other ranks still have files there, or removed it
                for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                    path.unlink(missing_ok=True)
                folder.rmdir()


def _settle(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def latest_complete(folder: Path, world_size: int) -> int | None:
    """The latest step for which this host has the states of this many ranks; None if there is
    none."""
    complete = [
        step
        for step, names in _listed(folder).items()
        if len({name.split("-")[1] for name in names}) >= world_size
    ]
    return max(complete, default=None)


def _listed(folder: Path) -> dict[int, set[str]]:
    """Map each step to the names of its files on this host."""
    found: dict[int, set[str]] = {}
    with suppress(FileNotFoundError):  # another rank may just remove an old step
        for path in folder.glob("step-*/rank-*"):
            step = _STEP.fullmatch(path.parent.name)
            if step and _FILE.fullmatch(path.name):
                found.setdefault(int(step[1]), set()).add(path.name)
    return found


def _holders(names: Sequence[str], held: Sequence[Set[str]]) -> tuple[int, ...] | None:
    """For each rank's file, a rank whose host has it, that rank itself if possible; None if any
    file is nowhere."""
    holders = []
    for rank, name in enumerate(names):
        known = [holder for holder, files in enumerate(held) if name in files]
        if not known:
            return None
        holders.append(rank if rank in known else known[0])
    return tuple(holders)


def _damages(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The damaged files among these, each with what is wrong."""
    found = {name: state_damage(folder / name) for name in names}
    return {name: f"{folder / name} is damaged: {why}" for name, why in found.items() if why}


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _name(rank: int, signature: str) -> str:
    return f"rank-{rank:05d}-{signature}.safetensors"


def _signature(pieces: Mapping[str, Piece]) -> str:
    """A hash of the names, types and places of tensors, which differs between layouts."""
    parts = [
        (name, str(piece.local.dtype), tuple(piece.local.shape), str(piece.slices))
        for name, piece in sorted(pieces.items())
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _jump_to_another(hosts: list[str]) -> int:
    """The least distance between ranks that always leads to another host; 0 if there is none."""
    size = len(hosts)
    for jump in range(1, size):
        if all(hosts[rank] != hosts[(rank + jump) % size] for rank in range(size)):
            return jump
    return 0
