"""Samples the stack of this process's main thread from another thread: whether it computes, waits
or hangs."""

import concurrent.futures.thread
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from fivefold.train.health.activity import Activity

SAMPLE_SECONDS = 0.5  # between two samples that show whether a rank makes progress
BUSY = 0.1  # share of this time that a process computes if it does not only wait
WATCHERS = ("rank status", "watchdog")  # names of the threads that sample
FRAMES_SHOWN = 12  # innermost frames of a status

_PACKAGE = Path(__file__).parents[2]
_TORCH = Path(torch.__file__).parent
_MESSAGES = str(_PACKAGE / "pipeline" / "run" / "messages.py")
_SENDING = (str(_PACKAGE / "mesh" / "collectives.py"), _MESSAGES)
# Where a rank that waits for another one is. On a GPU it waits where the engine reads a result.
_WAITING = (*_SENDING, str(_TORCH / "distributed"), str(_PACKAGE / "train" / "step_result.py"))


@dataclass(frozen=True)
class RankStatus:
    """The activity of a rank's main thread, or of the thread that it waits for.

    Attributes:
        place: innermost function that belongs neither to Python nor to torch.
        waits: whether it is in a collective or a message.
        moves: whether it was in another function half a second before, or has computed since.
        stack: innermost frames, as in a traceback.
        doing: its step and pipeline action, and the message that it waits for.
        idle: seconds since it began this step or action.
    """

    place: str
    waits: bool
    moves: bool
    stack: str
    doing: str
    idle: float

    @property
    def state(self) -> str:
        """What the thread does, and where: 'waits in _await (pipeline/run/executor.py:210)'."""
        verb = "waits" if self.waits else "is busy" if self.moves else "hangs"
        return f"{verb} in {self.place}"


class StackSampler:
    """Tells another thread what the thread that created it is doing.

    Args:
        activity: the step and action that the thread says it is in.
    """

    def __init__(self, activity: Activity) -> None:
        self._main, self._activity = threading.get_ident(), activity

    def sample(self) -> RankStatus:
        """Sample the stack twice, `SAMPLE_SECONDS` apart."""
        before = [frame.name for frame in self._active()]
        computed = time.process_time()
        time.sleep(SAMPLE_SECONDS)
        computed = time.process_time() - computed
        stack = self._active()
        doing = str(self._activity)
        if stack[-1].filename == _MESSAGES:
            doing += f"; needs {self._activity.needs}"
        return RankStatus(
            place_of(stack),
            stack[-1].filename.startswith(_WAITING),
            before != [frame.name for frame in stack] or computed > BUSY * SAMPLE_SECONDS,
            "".join(traceback.format_list(stack[-FRAMES_SHOWN:])),
            doing,
            self._activity.idle_seconds,
        )

    def _active(self) -> traceback.StackSummary:
        """The stack of the main thread, or of the thread that it waits for."""
        frames = sys._current_frames()
        main = frames.pop(self._main)
        watchers = {thread.ident for thread in threading.enumerate() if thread.name in WATCHERS}
        others = [f for ident, f in frames.items() if ident not in watchers and not _idle(f)]
        return traceback.extract_stack(others[0] if _idle(main) and others else main)


def _idle(frame: FrameType) -> bool:
    """Whether a thread waits for another thread of the process, or for work."""
    return frame.f_code.co_filename in (threading.__file__, concurrent.futures.thread.__file__)


def place_of(stack: traceback.StackSummary) -> str:
    """The innermost function outside of Python, torch and communication code, such as
    'next_batch (data/loader.py:88)'."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    frame = stack[-1]
    for frame in reversed(stack):
        parents = Path(frame.filename).parents
        of_python = standard in parents and not any(p.name == "site-packages" for p in parents)
        if not of_python and _TORCH not in parents and frame.filename not in _SENDING:
            break
    path = Path(frame.filename)
    inside = _PACKAGE in path.parents
    return f"{frame.name} ({path.relative_to(_PACKAGE) if inside else path}:{frame.lineno})"


def mark_work() -> torch.cuda.Event:
    """An event that occurs once the current GPU has done the work given to it so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
