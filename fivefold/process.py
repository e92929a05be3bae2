"""How a process of Fivefold begins and ends, without needless garbage collection.

Importing PyTorch makes a million objects that stay. Python searches them a hundred times while they
are made, and three times when it exits: two of the five seconds of CPU time of a process that does
little else.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from shlex import quote
from traceback import walk_tb
from typing import NoReturn

from fivefold.errors import ConfigError, Mistake

RARELY = 100_000
"""New objects after which Python looks for garbage, while a process imports and reads settings."""
_USUALLY = gc.get_threshold()
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Output(io.TextIOWrapper):
    """Standard output whose errors name its file, as the errors of other files do."""

    def write(self, text: str) -> int:
        """Write text.

        Raises:
            OSError: it cannot be written.
        """
        with _naming_output():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            OSError: it cannot be written.
        """
        with _naming_output():
            super().flush()


@contextlib.contextmanager
def _naming_output() -> Iterator[None]:
    """Add the file that standard output goes to, to an OSError raised in the block."""
    try:
        yield
    except OSError as error:
        error.filename = os.path.realpath("/dev/stdout")
        raise


def own_streams() -> None:
    """Make the standard streams those of a program, before it opens any file.

    Standard streams that the parent has closed lead to nowhere; otherwise the next file to be
    opened would take their place and receive their text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", buffering=1)  # noqa: SIM115
    out = sys.stdout or open(1, "w")  # noqa: SIM115
    if isinstance(out, io.TextIOWrapper):
        encoding, by_line, at_once = out.encoding, out.line_buffering, out.write_through
        sys.stdout = Output(out.detach(), encoding, line_buffering=by_line, write_through=at_once)


def begin() -> None:
    """Collect garbage rarely, until `work`, and escape characters that the output's encoding
    lacks."""
    gc.set_threshold(RARELY)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error does: names of files, texts
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def telling_environment() -> Iterator[None]:
    """Report environment variables that keep PyTorch from being imported in the block.

    PyTorch reads several of its own while it is imported; its errors mostly say what is wrong, but
    not with which variable.

    Raises:
        ConfigError: it cannot be imported, and the environment has some of its variables.
    """
    try:
        yield
    except (ValueError, AttributeError, OSError) as error:
        given = sorted(name for name in os.environ if name.startswith("TORCH_"))
        if not given or not _imports_torch(error):
            raise
        said = " ".join(str(error).split()).partition(". ")[0]
        variables = (f"{name}={quote(os.environ[name])}" for name in given)
        mistake = Mistake(
            "PyTorch cannot be imported in this environment",
            (f"{type(error).__name__}: {said}", *variables),
            attempt=f"unset {' '.join(given)}",
        )
        raise ConfigError(mistake) from None


def _imports_torch(error: Exception) -> bool:
    """Whether an error was raised while a module of PyTorch's was imported."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    modules = (f.f_globals["__name__"] for f in frames if f.f_code.co_name == "<module>")
    return any(name.partition(".")[0] == "torch" for name in modules)


def work() -> None:
    """Collect garbage as usual, since it may hold large tensors."""
    gc.set_threshold(*_USUALLY)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which forked it, ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def leave(status: int) -> NoReturn:
    """Exit as `sys.exit` does, but leave all memory to the system, unless a thread still works.

    What there is to say has been said: Ctrl-C now ends the process at once, without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if threading.active_count() > 1:
        sys.exit(status)
    # Not `gc.freeze`, which is as fast: extensions such as Triton's then report leaks.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(status)
