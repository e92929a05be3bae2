"""A lock that allows one run at a time in a run folder. Imports no torch.

A run holds `run.lock` in its folder: a file under a lock of the kernel (`flock`) that names its
owner. The kernel releases the lock when the last process of the run has ended, however it ended. So
a dead owner leaves no lock that has to be broken, and another process with its old process id is
not mistaken for it. Forked ranks inherit the lock; of ranks started by torchrun or srun, the first
one holds it.

NFS, GPFS, CephFS and Lustre (mounted with `flock`) share this lock between machines, but not every
mount does, and a process cannot find out. The owner therefore touches the file every few seconds,
and a lock that names another machine is watched for some of these heartbeats before it is taken
over.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Annotated, Self, TypeGuard

import msgspec
import psutil

from fivefold.errors import ConfigError, FivefoldError, Mistake, TrainingError
from fivefold.files import caused_by_full_disk, disk_full, parse_json

FILE = "run.lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 4 * BEAT_SECONDS
ENDING_SECONDS = 10.0  # a killed run holds its lock until its ranks have freed their memory
POLL_SECONDS = 0.05
MAX_BYTES = 4096
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Owner:
    """The run that holds a folder.

    Attributes:
        host: name of the machine.
        machine: identifier that differs for every machine and every boot of it.
        pid: process id of the parent of the ranks, or of the first rank.
        since: date and time at which it took the folder, as text.
        begun: whether all checks have passed and the folder is being written.
    """

    host: str
    machine: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    since: str
    begun: bool = False

    @property
    def here(self) -> bool:
        """Whether the owner is or was a process on this machine."""
        return self.machine == _machine()

    @property
    def alive(self) -> bool:
        """Whether the owner's process is running on this machine."""
        try:
            return self.here and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderInUse(ConfigError):
    """Another run uses the folder."""


class RunLock:
    """The lock on a run folder, held until `release` or the end of all processes that hold it.

    Leaving its block releases it. If the run never began, the file and the folders that were
    created are removed again, and the lock file of a dead owner is restored.

    Attributes:
        folder: the locked folder.
        made: folders that were created, outermost first.
    """

    def __init__(self, folder: Path, descriptor: int, made: list[Path]) -> None:
        self.folder, self.made = folder, made
        self._file, self._descriptor = folder / FILE, descriptor
        self._found = os.pread(descriptor, MAX_BYTES, 0)
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self._owner = Owner(socket.gethostname(), _machine(), os.getpid(), since)
        try:
            self._sign()
        except OSError:
            self._put_back()
            raise

    def begin(self) -> None:
        """Record that the run has begun, so that its folder is kept."""
        self._owner = replace(self._owner, begun=True)
        self._sign()

    def check(self) -> None:
        """Check that the folder still exists and belongs to this run.

        Raises:
            TrainingError: it was deleted, moved, or taken by another run.
        """
        if not _is_at(self._descriptor, self._file):
            raise TrainingError(self._loss())
        if not self._owns(_read(self._descriptor)):
            raise TrainingError(
                f"the run folder {self.folder} was taken over by "
                f"{_read(self._descriptor) or 'another run'}: this file system keeps no locks "
                "between machines"
            )

    def _owns(self, now: Owner | None) -> TypeGuard[Owner]:
        """Whether the file still names this run, whichever of its processes took the lock."""
        return now is not None and replace(now, begun=False) == replace(self._owner, begun=False)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Touch the file regularly while the block runs, as a sign that the owner is alive."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                with suppress(OSError):  # `check` reports it
                    os.utime(self._descriptor)

        thread = threading.Thread(target=beat, name="run-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def release(self) -> None:
        """Release the folder."""
        now = _read(self._descriptor)
        if not self._owns(now):
            os.close(self._descriptor)  # taken over
            return
        with suppress(OSError):  # only who holds the lock may remove the file: see `_take`
            if not now.begun:
                self._put_back()
            elif _is_at(self._descriptor, self._file):
                self._file.unlink()
        os.close(self._descriptor)
        if not now.begun:
            _remove_empty(self.made)

    def _put_back(self) -> None:
        """Restore the file as it was found."""
        if self._found:
            _write(self._descriptor, self._found)
        elif _is_at(self._descriptor, self._file):
            self._file.unlink()

    def _sign(self) -> None:
        _write(self._descriptor, (json.dumps(asdict(self._owner)) + "\n").encode())

    def _loss(self) -> Mistake:
        """A description of what happened to a folder that no longer holds our lock."""
        now = _path_of(self._descriptor)
        if now is not None and now.name == FILE and now.parent != self.folder.absolute():
            return Mistake(
                f"the run folder {self.folder} was moved to {now.parent} while the run went on",
                ("nothing more is written there",),
                attempt="move it back and start the run again, or go on there with --save "
                f"{quote(str(now.parent))}",
            )
        if not self.folder.is_dir():
            what = f"the run folder {self.folder} was deleted while the run went on"
        else:
            what = f"{self._file} was removed while the run went on: another run could start there"
        return Mistake(what, attempt="start the run again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def claim(folder: Path) -> RunLock:
    """Lock a run folder, which is created if it does not exist.

    A lock file that names another machine is watched for `WATCH_SECONDS` first, since the file
    system may not share locks between machines. Prints that a lock is watched, or taken over.

    Raises:
        FolderInUse: another run holds the folder; the error names its host and process.
        ConfigError: the folder cannot be written.
    """
    made: list[Path] = []
    try:
        descriptor = _take(folder, made)
        try:
            return RunLock(folder, descriptor, made)
        except BaseException:
            os.close(descriptor)
            raise
    except BaseException as error:
        _remove_empty(made)
        if isinstance(error, OSError):
            raise cannot_write(folder, error) from None
        raise


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """The message for a run folder that cannot be written."""
    at = "" if error.filename in (None, str(folder)) else f" ({error.filename})"
    what = f"cannot write the run folder {folder}: {error.strerror}{at}"
    if caused_by_full_disk(error):
        return ConfigError(disk_full(what, folder))
    return ConfigError(Mistake(what, attempt="another --save"))


def _take(folder: Path, made: list[Path]) -> int:
    """Open and lock the file; return its descriptor, which holds the lock.

    An owner removes the file before it releases the lock. A process that waited for that lock then
    holds the lock of a removed file; it notices this, and tries again.
    """
    patience = time.monotonic() + ENDING_SECONDS
    while True:
        _make_folders(folder, made)
        try:
            descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # an owner that never began has just removed the folder
            if time.monotonic() > patience:
                raise
            continue
        try:
            locked, owner = lock_file(descriptor), _read(descriptor)
            if locked is not False and _is_at(descriptor, folder / FILE):
                _await_silence(folder, descriptor, owner, locked is True)
                return descriptor
            # A dead owner's ranks may live a moment longer; a new owner may not have signed yet.
            living = owner is not None and (owner.alive or not owner.here)
            if (locked is False and living) or time.monotonic() > patience:
                raise _in_use(folder, owner)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(POLL_SECONDS)


def _await_silence(folder: Path, descriptor: int, owner: Owner | None, locked: bool) -> None:
    """Return when the owner that an unlocked file names is dead.

    Raises:
        FolderInUse: the owner is alive on a machine whose lock this one cannot see.
    """
    if os.fstat(descriptor).st_size == 0:
        return
    name = str(owner) if owner is not None else "an owner whose name cannot be read"
    if not (locked and owner is not None and owner.here):
        print(f"{folder / FILE} names {name}: watching for {WATCH_SECONDS:g} s whether it lives")
        first, until = _last_beat(folder), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < until:
            time.sleep(min(1.0, BEAT_SECONDS))
            if _last_beat(folder) != first:
                raise _in_use(folder, owner)
    print(f"takes {folder} over from {name}, which has ended without giving it up")


def _in_use(folder: Path, owner: Owner | None) -> FolderInUse:
    if owner is None:
        who, end = "another process, which has not given its name", "wait until it has ended"
        why = "its lock is held, and names nobody"
    elif owner.here and not owner.alive:
        who, end = str(owner), "end them, or wait"
        why = "that process has ended, and others that it started have not"
    else:
        place = "" if owner.here else f"on {owner.host} "
        who, end = str(owner), f"{place}end that run: kill {owner.pid}"
        why = f"it has it since {owner.since}; two runs in one folder would overwrite each other"
    what = f"the run folder {folder} is in use by {who}"
    return FolderInUse(Mistake(what, (why,), attempt=f"another --save, or {end}"))


def _make_folders(folder: Path, made: list[Path]) -> None:
    """Create a folder and its parents, and add those that did not exist to `made`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:  # another start was faster; or a broken link
            if path.is_symlink() and not path.exists():
                raise
        else:
            made.append(path)


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders that are empty, the last one first."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def lock_file(descriptor: int) -> bool | None:
    """Whether the lock was obtained; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # EBADF: NFS cannot lock a file opened for reading only, as folders are.
        none = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF)
        if error.errno in none:
            return None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _read(descriptor: int) -> Owner | None:
    """The owner named in the file; None if the file names none, or cannot be parsed."""
    try:
        text = os.pread(descriptor, MAX_BYTES, 0).decode(errors="replace")
        return parse_json(text, Owner, FILE)
    except (OSError, FivefoldError):
        return None


def _write(descriptor: int, text: bytes) -> None:
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))
    os.fsync(descriptor)


def _last_beat(folder: Path) -> int:
    """The time at which the file was last touched; opening it makes NFS bypass its cache."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _path_of(descriptor: int) -> Path | None:
    """The current path of an open file, if the kernel tells it (Linux)."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return path if path.exists() else None
    return None


def _machine() -> str:
    """An identifier of the running kernel, which containers share and machines do not."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
