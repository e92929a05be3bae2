"""One owner of a run folder at a time. Imports no torch.

Whoever trains into a folder holds `run.lock` in it: a file under the kernel's lock (`flock`) that
names its owner. The kernel gives the lock up when the last process of the run is gone, however it
ended, so a dead owner leaves nothing that has to be broken, two starts cannot break it at once, and
another process with the owner's old number is not taken for it. Ranks that are forked inherit it;
ranks that torchrun or srun started are spoken for by the first one.

NFS, GPFS, CephFS and Lustre (mounted with `flock`) keep this lock between machines, but not every
mount does, and who asks cannot tell. The owner therefore touches the file every few seconds, and a
lock that names another machine is watched for some of these beats before it is taken over.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec
import psutil

from fivefold.errors import ConfigError, FivefoldError, Mistake, TrainingError
from fivefold.files import parse_json

FILE = "run.lock"
BEAT_SECONDS = 5.0
WATCH_SECONDS = 4 * BEAT_SECONDS
ENDING_SECONDS = 10.0  # a killed run holds its lock until its ranks have freed their memory
POLL_SECONDS = 0.05
MAX_BYTES = 4096
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Owner:
    """Who holds a run folder.

    Attributes:
        host: name of the machine.
        machine: the same, but different for every boot of every machine.
        pid: pid of the process that was started, the parent of the ranks or the first of them.
        since: when, for people.
        begun: every check has passed, and the folder is being written.
    """

    host: str
    machine: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    since: str
    begun: bool = False

    @property
    def here(self) -> bool:
        """Whether it is or was a process of this machine."""
        return self.machine == _machine()

    @property
    def alive(self) -> bool:
        """Whether there is such a process on this machine."""
        try:
            return self.here and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderInUse(ConfigError):
    """Somebody else trains into the folder."""


class RunLock:
    """The right to write a run folder, until `release` or the end of all processes that hold it.

    Leaving its block releases it. What a run that never began has made, the file and new folders,
    is then removed, and a dead owner's lock is put back as it was found.

    Attributes:
        folder: folder that is owned.
        made: folders that did not exist, outermost first.
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
        """Note that the run has begun: from now on its folder stays."""
        self._owner = replace(self._owner, begun=True)
        self._sign()

    def check(self) -> None:
        """See that the folder is where it was and still ours.

        Raises:
            TrainingError: it was deleted, moved, or taken by another run.
        """
        if not _is_at(self._descriptor, self._file):
            raise TrainingError(str(self._loss()))
        if _read(self._descriptor) != self._owner:
            raise TrainingError(
                f"the run folder {self.folder} was taken over by "
                f"{_read(self._descriptor) or 'another run'}: this file system keeps no locks "
                "between machines"
            )

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show in the block, by touching the file, that the owner lives."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                with suppress(OSError):  # `check` says what is wrong
                    os.utime(self._descriptor)

        thread = threading.Thread(target=beat, name="run-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def release(self) -> None:
        """Give the folder up."""
        now = _read(self._descriptor)
        if now is None or replace(now, begun=False) != replace(self._owner, begun=False):
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
        """Leave the file as it was found."""
        if self._found:
            _write(self._descriptor, self._found)
        elif _is_at(self._descriptor, self._file):
            self._file.unlink()

    def _sign(self) -> None:
        _write(self._descriptor, (json.dumps(asdict(self._owner)) + "\n").encode())

    def _loss(self) -> Mistake:
        """What became of a folder whose lock is no longer in it."""
        now = _path_of(self._descriptor)
        if now is not None and now.name == FILE and now.parent != self.folder.absolute():
            return Mistake(
                f"the run folder {self.folder} was moved to {now.parent} while the run went on",
                ("nothing more is written there",),
                attempt="move it back and start the run again, or go on there with --save "
                f"{now.parent}",
            )
        if not self.folder.is_dir():
            what = f"the run folder {self.folder} was deleted while the run went on"
        else:
            what = f"{self._file} was removed while the run went on: another run could start there"
        return Mistake(what, attempt="start the run again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def claim(folder: Path, tell: Tell = print) -> RunLock:
    """Become the owner of a run folder, which is made if need be.

    A lock that another machine's run may hold, without this file system saying so, is watched for
    `WATCH_SECONDS` first.

    Args:
        folder: folder of a run.
        tell: is told of a lock that is watched or taken over.

    Raises:
        FolderInUse: another run has it, named by host and process.
        ConfigError: the folder cannot be written.
    """
    made: list[Path] = []
    try:
        descriptor = _take(folder, made, tell)
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
    return ConfigError(Mistake(what, attempt="another --save"))


def _take(folder: Path, made: list[Path], tell: Tell) -> int:
    """Open and lock the file; a descriptor, which is the lock.

    A releasing owner removes the file while it holds the lock. Whoever waited on that file then
    has the lock of a file that is no longer there, sees it, and tries again.
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
            locked, owner = _flock(descriptor), _read(descriptor)
            if locked is not False and _is_at(descriptor, folder / FILE):
                _await_silence(folder, descriptor, owner, locked is True, tell)
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


def _await_silence(
    folder: Path, descriptor: int, owner: Owner | None, locked: bool, tell: Tell
) -> None:
    """Return when the owner that a free lock names is dead.

    Raises:
        FolderInUse: it lives, on a machine from which its lock cannot be seen.
    """
    if os.fstat(descriptor).st_size == 0:
        return
    name = str(owner) if owner is not None else "an owner whose name cannot be read"
    if not (locked and owner is not None and owner.here):
        tell(f"{folder / FILE} names {name}: watching for {WATCH_SECONDS:g} s whether it lives")
        first, until = _last_beat(folder), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < until:
            time.sleep(min(1.0, BEAT_SECONDS))
            if _last_beat(folder) != first:
                raise _in_use(folder, owner)
    tell(f"takes {folder} over from {name}, which has ended without giving it up")


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
    """As mkdir -p, noting in `made` what was not there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:  # another start was faster, unless it is a link to nowhere
            if path.is_symlink() and not path.exists():
                raise
        else:
            made.append(path)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the last first, unless somebody has put something into them."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def _flock(descriptor: int) -> bool | None:
    """Whether we got the kernel's lock; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            return None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that is found at `path`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _read(descriptor: int) -> Owner | None:
    """Who has signed; None if nobody has, or not legibly."""
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
    """When the file was touched. Opening it makes NFS ask its server rather than its cache."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _path_of(descriptor: int) -> Path | None:
    """Where an open file lies now, if the kernel tells (Linux)."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return path if path.exists() else None
    return None


def _machine() -> str:
    """Of the running kernel, which containers share and machines do not."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
