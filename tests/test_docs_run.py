"""The documentation's commands, run in the order in which a reader meets them, in one folder.

What needs a cluster, or a corpus that is not here, makes a dry run; what a launcher starts is left
to the parser's test. Every other command does what its page says it does: it ends well, a training
command trains (on a small corpus and in small batches, unless a page names its losses), and what a
page shows is what is printed, times apart.
"""

import contextlib
import json
import multiprocessing
import os
import platform
import re
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.command_lines import work
from tests.programs import Program
from tests.test_docs import DOCS, HEREDOC, LINK, ROOT, Command, _blocks, _commands, unsaid

pytestmark = pytest.mark.slow

HERE = ("debug", "debug-mixtral", "demo")  # recipes that this machine can train
TELLING = ("plan", "rehearse", "schedule", "verify")  # verbs that write only what is asked for
NAMED = re.compile(r"fivefold train debug( --nproc 2 --[tp]p 2)?")  # the tutorial has their losses
COMPUTING = ("eval", "sample", "train", "verify")  # verbs that leave a process changed
SMALL, FEW, SHORT = " --data-path my-texts", " --gbs 2", " --train-iters 6"
PROFILED = " --profile-step-start 3 --profile-step-end 5"
FILE = re.compile(r"^runs/|\.[a-z]+$")
STEP = re.compile(r"^ *\d+/\d+ ", re.MULTILINE)
SECONDS = 240


def in_reading_order() -> list[Path]:
    """The README, then the pages as the index lists them."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    return [ROOT / "README.md", *((DOCS / target).resolve() for target in LINK.findall(index))]


def steps_of(page: Path) -> Iterator[Command]:
    """A page's commands that can be run, as they are run here."""
    for command in _commands():
        argv = command.argv
        if command.page != page or argv is None or command.is_launched or "--help" in argv:
            continue
        if "cuda" in argv:  # there may be no GPU
            continue
        if argv[0] == "train" and "--dry-run" not in argv and argv[1] not in HERE:
            yield Command(page, f"{command.line} --dry-run", command.output)
        elif argv[0] == "train" and "--dry-run" not in argv and not NAMED.fullmatch(command.line):
            small = "" if {"--data-path", "--mock-data"} & {*argv} else SMALL
            few = FEW if argv[1] != "demo" else " --gbs 4"  # of microbatches of two
            short = "" if "--train-iters" in argv else SHORT
            short += PROFILED if "--profile" in argv else ""
            yield Command(page, command.line + small + few + short, command.output)
        elif not argv[0].startswith("--"):
            yield command


def only_tells(command: Command) -> bool:
    """Whether no page shows what a command prints, and it has to do with no file: then it proves
    what the tests of its room do, and tests/test_docs.py sees that its flags are taken; or it is a
    dry run, which that makes, too, and compares with what its page shows."""
    verb, *words = command.argv or [""]
    alone = verb in TELLING and not any(map(FILE.search, words))
    return "--dry-run" in words or (alone and not command.output)


def prepare(folder: Path) -> None:
    """The texts that pages speak of, and the files that they have the reader write."""
    lines = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(800)]
    for name in ("my-texts/a.md", "more-texts/a.txt", "code/a.py", "a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    for name, key in (("docs.jsonl", "body"), ("b.jsonl", "text"), ("wiki.jsonl", "text")):
        records = "".join(json.dumps({key: line}) + "\n" for line in lines)
        (folder / name).write_text(records, encoding="utf-8")
    for block in _blocks("sh"):
        for name, content in HEREDOC.findall(block.text):
            (folder / name).write_text(content, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder, kept from page to page."""
    path = tmp_path_factory.mktemp("reader")
    prepare(path)
    return path


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each command printed, so that one which two pages show is run once."""
    return {}


class Reader:
    """Runs command lines: those that train in a process of its own each, all others in one.

    The processes have imported PyTorch when they begin.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env = os.environ | {"HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self._env["XDG_CACHE_HOME"] = str(folder / ".cache")
        self._lasting = self._start()

    def run(self, argv: list[str]) -> tuple[int, str]:
        """The status and the output of a command line."""
        if argv[0] not in COMPUTING:
            return self._ask(*self._lasting, argv)
        process, channel = self._start()
        try:
            return self._ask(process, channel, argv)
        finally:
            process.kill()
            process.wait()

    def close(self) -> None:
        self._lasting[0].kill()

    def _start(self) -> tuple[Program, Connection]:
        ours, theirs = multiprocessing.Pipe()
        process = Program(work, theirs, cwd=self._folder, env=self._env)
        theirs.close()
        return process, ours

    def _ask(self, process: Program, channel: Connection, argv: list[str]) -> tuple[int, str]:
        channel.send(argv)
        assert channel.poll(SECONDS), f"{argv} takes more than {SECONDS} s"
        with contextlib.suppress(EOFError):
            return channel.recv()
        return -1, (self._folder / f".output-{process.pid}").read_text()


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[Reader]:
    made = Reader(folder)
    yield made
    made.close()


def expected_status(command: Command) -> int:
    assert command.argv is not None
    if command.output.startswith("error:"):
        return 2
    return 1 if "--plant" in command.argv else 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", in_reading_order(), ids=lambda page: page.stem)
@pytest.mark.parametrize(
    "every", [pytest.param(True, marks=pytest.mark.exhaustive), False], ids=["every", "most"]
)
def test_commands_do_what_the_page_says(every: bool, page: Path, reader: Reader, said) -> None:
    for command in steps_of(page):
        if only_tells(command) and not every:
            continue
        argv = command.argv
        assert argv is not None
        if command.line not in said:
            status, said[command.line] = reader.run(argv)
            assert status == expected_status(command), f"{command}\n{said[command.line]}"
        if argv[0] == "train" and "--dry-run" not in argv:
            assert STEP.search(said[command.line]), f"{command}\n{said[command.line]}"
        assert not unsaid(command.output, said[command.line]), f"{command}\n{said[command.line]}"


def test_layouts_print_the_losses_that_the_tutorial_names(said) -> None:
    """All the same; and those, with the library of that Python as the corpus."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    named = re.search(r"Python (\S+) as the corpus (\S+) at step 1 and (\S+) at\nstep 10", text)
    layouts = [said[line] for line in said if NAMED.fullmatch(line)]
    assert len(layouts) == 3
    of_steps = re.compile(r"^ *(?:1|10)/10 +(\S+)", re.MULTILINE)
    losses = {tuple(of_steps.findall(each)) for each in layouts}
    assert len(losses) == 1 and all(len(each) == 2 for each in losses), losses
    if platform.python_version() == named[1]:
        assert losses == {named.groups()[1:]}
