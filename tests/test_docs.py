"""What the documentation says can be done: its commands, excerpts, recipes, code and links.

A fenced block of `console` or `sh` holds commands. One of `text` may name, after that word, the
command whose output it is an excerpt of. Nothing is started: a command is read by the program's own
parser, and `fivefold train` makes a dry run.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from fivefold.check import NOT_BUILT, check
from fivefold.cli.main import VERBS, main
from fivefold.config.config import SECTION_SETTINGS
from fivefold.config.flags import ALIASES, SWITCHES
from fivefold.config.sources import load, load_options, read_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
    if path.exists()
]
FENCE = re.compile(r"^```(\w*) *(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
HEREDOC = re.compile(r"^cat > (\S+) << 'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
NUMBER = re.compile(r"\d[\d.,]*(e[-+]\d+)?( [mu]?s\b)?")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
OF_A_CLUSTER = {"srun"}
"""Programs that pages name and that no machine of a developer has."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of the opening line, and its lines."""

    page: Path
    language: str
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.info or self.text.splitlines()[0]}"


@dataclass(frozen=True)
class Command:
    """A command line and the output that is shown below it."""

    page: Path
    line: str
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.line[:90]}"

    @property
    def argv(self) -> list[str] | None:
        """What `fivefold` is given, also behind a launcher; None if it is not in the line."""
        words = shlex.split(self.line, comments=True)
        launched = words[:1] in (["fivefold"], ["torchrun"], ["srun"]) and "fivefold" in words
        return words[words.index("fivefold") + 1 :] if launched else None

    @property
    def is_launched(self) -> bool:
        return not self.line.startswith("fivefold")


def _blocks(*languages: str) -> list[Block]:
    return [
        Block(page, *match.groups())
        for page in PAGES
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
        if match[1] in languages
    ]


def _commands() -> Iterator[Command]:
    for block in _blocks("console", "sh"):
        text = HEREDOC.sub("", block.text).replace("\\\n", " ")
        if block.language == "sh":
            yield from (Command(block.page, line) for line in text.splitlines())
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(block.page, line, output)


COMMANDS = [command for command in _commands() if command.argv]


@cache
def _dry_run(line: str) -> tuple[int, str]:
    """Exit status and all output of a `fivefold train` line, made a dry run."""
    argv = shlex.split(line)[1:]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = main(argv if "--dry-run" in argv else [*argv, "--dry-run"])
    return status, out.getvalue()


def plain(text: str) -> list[str]:
    """Lines without their numbers and times, since those of a run's speed differ.

    Nor with the worst parameter, which is a matter of rounding.
    """
    lines = [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("worst")]


def unsaid(shown: str, printed: str) -> list[str]:
    """The lines of the first part of what a page shows that was not printed, in one piece."""
    said = plain(printed)
    for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE):
        lines = plain(part)
        places = range(len(said) - len(lines) + 1)
        if not any(said[place : place + len(lines)] == lines for place in places):
            return lines
    return []


def test_a_page_leaves_out_no_line_without_saying_so() -> None:
    printed = "size 1 B\nworst x\ntime 2 s\n\nall is well"
    assert not unsaid("size 5 B\ntime 3.1 ms\n\n", printed)
    assert not unsaid("size 5 B\n...\nall is well", printed)
    assert unsaid("size 5 B\nall is well", printed) and unsaid("time 2 s\nsize 1 B", printed)


def test_there_is_something_to_test() -> None:
    assert len(PAGES) > 10 and len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_are_accepted(command: Command) -> None:
    assert command.argv is not None
    verb, *argv = command.argv
    assert verb in VERBS or verb.startswith("--")
    if verb == "train" and not command.is_launched:
        status, said = _dry_run(command.line)
        wrong = command.output.startswith("error:")
        assert status == (2 if wrong else 0), said
        if wrong:
            assert command.output in said
        elif "--dry-run" in argv:
            assert not unsaid(command.output, said), said
    elif verb in VERBS:
        options = import_module(f"fivefold.cli.{verb}").Options
        if "recipe" in {field.name for field in fields(options)}:
            asked, config = load(argv, options)
            if verb == "verify":
                check(config, asked.nproc)
        else:
            load_options(argv, options)


EXCERPTS = [block for block in _blocks("text") if block.info]


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=str)
def test_excerpts_are_what_is_printed(excerpt: Block) -> None:
    _, said = _dry_run(excerpt.info)
    assert excerpt.text in said, said


@pytest.mark.parametrize("block", _blocks("toml"), ids=str)
def test_recipes_can_be_read(block: Block, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(block.text)
    check(read_config(recipe), 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page: Path) -> None:
    names: dict[str, object] = {}
    for block in _blocks("python"):
        if block.page == page:
            exec(compile(block.text, str(block), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [t for t in LINK.findall(prose) if not t.startswith(("http:", "https:", "mailto:"))]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = Counter[str]()
    anchors = set()
    for heading in HEADING.findall(prose):
        text = re.sub(r"\]\([^)]*\)", "", heading.strip().lower())
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        anchors.add(f"{name}-{named[name]}" if named[name] else name)
        named[name] += 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    missing = [
        f"{target}#{anchor}"
        for target, anchor in ANCHOR.findall(prose)
        if not target.startswith("http")
        and anchor not in _anchors(page.parent / target if target else page)
    ]
    assert not missing


def test_programs_are_there() -> None:
    """What a page has the reader type exists under that name, in this environment or any."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    named = {words[0] for c in _commands() if (words := shlex.split(c.line, comments=True))}
    assert {"fivefold", "torchrun", "hf"} <= named
    assert not {n for n in named - OF_A_CLUSTER if shutil.which(n, path=path) is None}


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {(DOCS / target).resolve() for target in LINK.findall(index)}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= linked


def test_the_house_has_the_floors_that_are_kept() -> None:
    floors = runpy.run_path(str(ROOT / "tests" / "test_floors.py"))["FLOORS"]
    page = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| room |")[2].partition("\n\n")[0]
    named = [
        room for row in table.splitlines()[2:] for room in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    built = [room for room in floors if list((ROOT / "fivefold").glob(f"{room}*"))]
    assert named == [room for room in built if room != "__main__"]


def _flags_of(title: str) -> list[str]:
    """The flags that a section of the page for Megatron-LM's users names."""
    page = (DOCS / "how-to" / "from-megatron.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [flag[2:].replace("-", "_") for flag in re.findall(r"`(--[\w-]+)", section)]


def _known_flags() -> set[str]:
    return {s.name for each in SECTION_SETTINGS.values() for s in each} | set(ALIASES)


def test_megatrons_flags_are_where_the_page_says() -> None:
    """Accepted, planned with only, or unknown; and no section forgets what is not trained."""
    untrained = {name for name, _, _ in NOT_BUILT}
    accepted = _flags_of("Accepted as they are")
    assert len(accepted) > 80
    assert not [f for f in accepted if f not in _known_flags() | set(SWITCHES) or f in untrained]
    assert set(_flags_of("Planned with, not trained")) == untrained
    absent = _flags_of("Not there yet")
    assert absent and not [flag for flag in absent if flag in _known_flags() | set(SWITCHES)]
