"""Processes of the program, forked from one that has imported PyTorch: it takes milliseconds where
a new interpreter computes for three seconds. That one is itself forked, from the tests' own process
before it runs any of them: to import all of it anew would take seven.

`start(words)` runs `fivefold` with these words in a process of its own, as a shell would, and
`run(words)` waits for its end. They are for tests of what a process does; that an interpreter can
be started with `-m fivefold` is tested in tests/test_bad_input.py.
"""

import gc
import logging
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.launcher import LaunchConfig, elastic_launch

from fivefold.cli.main import program
from fivefold.process import die_with_parent
from tests.disk import do_not_wait

VERBS = ("eval", "plan", "report", "schedule", "train", "verify")
ROOMS = (
    *("fivefold.train.run", "fivefold.inference.eval", "fivefold.verify.run", "tests.programs"),
    *("fivefold.cli.sample", "fivefold.rehearse.run", "fivefold.tell.report"),
    *("tokenizers", "torch._dynamo"),  # which the rooms import late
)


@cache
def forking() -> ForkServerContext:
    """Where processes are forked from one that has imported all they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(f"fivefold.cli.{verb}" for verb in VERBS), *ROOMS])
    return context


def begin() -> None:
    """Fork the process from which programs are forked, while nothing makes this one unfit for it:
    neither threads, nor finalizers, nor what pytest redirects while it collects or runs tests."""
    forking()
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_: object, arguments: Sequence[str], files: Sequence[int]) -> int:
    """As the function of `multiprocessing` that would start a new interpreter with these arguments,
    of which the last is a script. It imports what is missing once the first program is asked for.
    """
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        try:
            die_with_parent(parent)
            select.select(files[:1], [], [])
            exec(arguments[-1])
        finally:
            os._exit(0)
    return pid


class Program:
    """A process that was started; as `subprocess.Popen`, whose output is in files meanwhile.

    Args:
        body: called in the process; what it returns, or gives to `sys.exit`, is the exit status.
        arguments: its arguments, pickled.
        said: what is on its standard input.
        cwd: its working directory; None: that of this process.
        env: its environment; None: that of this process.
        own_session: whether it leads a session and a process group of its own.
    """

    def __init__(
        self,
        body: Callable[..., int | None],
        *arguments: Any,
        said: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fivefold-program-")
        self._files = [Path(self._folder.name, name) for name in ("in", "out", "err")]
        for file in self._files:
            file.write_text(said if file.name == "in" else "")
        how = (cwd or Path.cwd(), dict(os.environ if env is None else env), own_session)
        ready, begins = multiprocessing.Pipe(duplex=False)
        self._process = forking().Process(
            target=_become, args=(begins, self._files, *how, body, arguments), daemon=False
        )
        self._process.start()
        begins.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        ready.recv_bytes()  # else a signal might come before its session and its handlers

    @property
    def returncode(self) -> int | None:
        """The exit status, or a signal's number with a minus; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait, and read all that it wrote to standard output and standard error."""
        self.wait(timeout)
        out, err = (file.read_text(encoding="utf-8") for file in self._files[1:])
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[str], **how: Any) -> Program:
    """`fivefold` with these words; see `Program`."""
    return Program(fivefold, [*words], **how)


def run(words: Sequence[str], timeout: float = 200.0, **how: Any) -> CompletedProcess[str]:
    """`fivefold` with these words, run to its end."""
    process = start(words, **how)
    try:
        out, err = process.communicate(timeout)
    except TimeoutExpired:
        process.kill()
        raise
    assert process.returncode is not None
    return CompletedProcess([*words], process.returncode, out, err)


def torchrun(ranks: int, body: Callable[..., int | None], *arguments: Any) -> None:
    """What torchrun does, with ranks forked from it; call it in a process of its own."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="standalone",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, body)(*arguments)


def fivefold(words: list[str]) -> None:
    """The program, in a process of its own."""
    sys.argv = ["fivefold", *words]
    program()


def _become(
    begins: Connection,
    files: Sequence[Path],
    cwd: Path,
    env: Mapping[str, str],
    own_session: bool,
    body: Callable[..., int | None],
    arguments: tuple[Any, ...],
) -> None:
    """In the new process: what a shell would have set before."""
    gc.freeze()  # what was imported is never garbage
    do_not_wait()
    if own_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, (file, mode) in enumerate(zip(files, ("r", "w", "w"), strict=True)):
        with file.open(mode, encoding="utf-8") as opened:
            os.dup2(opened.fileno(), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    # What pytest has put in their places.
    logging.getLogger().handlers.clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    begins.send_bytes(b"")
    begins.close()
    sys.exit(body(*arguments))
