import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from fivefold import process
from tests.disk import do_not_wait

if TYPE_CHECKING:
    from tests.pool import Pool


def pytest_sessionstart() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and programs inherit that.

    Until all tests are collected nothing but imports is done.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process.begin()


if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads once, when torch first imports it

do_not_wait()
settings.register_profile("any machine", settings(), deadline=None)  # time says nothing of a result
settings.load_profile("any machine")

LONG = (
    "tests/train/test_faults.py",
    "tests/test_docs_run.py",
    "tests/train/test_run.py",
    "tests/verify/test_matrix.py",
    "tests/verify/test_experts.py",
    "tests/audit/test_audit.py",
    "tests/verify/test_command.py",
    "tests/train/test_launch.py",
    "tests/verify/test_compile.py",
    "tests/verify/test_pairs.py",
    "tests/optim/test_offload.py",
    "tests/search/test_any_question.py",
    "tests/search/test_proven.py",
    "tests/verify/test_families.py",
    "tests/verify/test_lora.py",
)
"""Files that take longest, some of them by waiting: a process that began one of them at the end
would leave the others idle."""


COLLECTED = pytest.StashKey[dict[str, bool]]()
"""Files of which tests were collected, and whether some of these need a GPU."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, and skip tests of GPUs where there is none."""
    items.sort(key=lambda item: LONG.index(_file(item)) if _file(item) in LONG else len(LONG))
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    files = {_file(item) for item in marked}
    config.stash[COLLECTED] = {_file(item): _file(item) in files for item in items}
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the processes from which programs and ranks are forked: no test has yet made this
    process unfit for it.

    What has been imported is never garbage; nobody looks through it again, here or in ranks. And
    garbage stays rarely looked for: with all that tests import, that took a tenth of their time.
    """
    if session.config.option.collectonly:
        return
    ranks = any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
    ranks = ranks or "tests.pool" in sys.modules
    gc.freeze()
    if ranks:
        from fivefold.train.ranks.children import import_what_ranks_import

        import_what_ranks_import()
    if "tests.programs" in sys.modules:
        from tests import programs

        programs.begin()
    if ranks:
        _pool()


@pytest.fixture(scope="session")
def pool() -> "Pool":
    """`pool.run(world_size, fn, *args)`: see tests/pool.py. Imports torch only when asked for."""
    return _pool()


def _pool() -> "Pool":
    from tests.pool import shared_pool

    return shared_pool()
