"""The two rules of the house: no room imports from a room below it, and where torch stays out.

`FLOORS` is the order of the design document; a new room is given its floor here.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (
    "errors",
    "units",
    "files",
    "once",
    "hub",
    "process",
    "pages",
    "shell",
    "config",
    "recipes",
    "hardware",
    "reliability",
    "mesh",
    "description",
    "model",
    "tensor",
    "context",
    "expert",
    "data_parallel",
    "memory",
    "pipeline",
    "layout",
    "batch_rules",
    "check",
    "counts",
    "parallel_model",
    "parallelize",
    "optim",
    "data",
    "checkpoint",
    "convert",
    "audit",
    "train",
    "inference",
    "predict",
    "search",
    "tell",
    "jobs",
    "published",
    "calibrate",
    "verify",
    "rehearse",
    "report",
    "learn",
    "docs",
    "cli",
    "__main__",
)
# A name stands for a module, or for a room and all that is in it.
WITH_TORCH = ("pipeline.run",)
TORCH_FREE = (
    "errors",
    "units",
    "files",
    "once",
    "hub",
    "process",
    "pages",
    "shell",
    "config",
    "recipes",
    "mesh.arguments",
    "mesh.buckets",
    "mesh.degrees",
    "mesh.grid",
    "mesh.nodes",
    "mesh.rules",
    "description",
    "model.attention.blocks",
    "model.eight_bit.rules",
    "model.fusion_rules",
    "model.shards",
    "context.balance",
    "data_parallel.blocks",
    "data_parallel.rules",
    "data_parallel.zeropp_rules",
    "memory.rules",
    "pipeline",
    "layout",
    "batch_rules",
    "check",
    "counts",
    "predict",
    "search",
    "tell",
    "jobs",
    "published",
    "audit.races",
    "audit.record",
    "audit.report",
    "train.folder.lock",
    "train.machine.numa",
    "train.machine.open_files",
    "train.folder.preflight",
    "report",
    "learn",
    "rehearse.agree",
    "rehearse.report",
    "rehearse.roles",
    "rehearse.script",
    "verify.report",
    "verify.shrink",
    "cli",
)
START_SECONDS = 0.5  # of one CPU, from an interpreter that runs to a configuration checked


@cache
def _files() -> dict[str, Path]:
    """Path of every module by its name below fivefold: 'mesh.grid', 'mesh' for a package."""
    files = {}
    for path in sorted((ROOT / "fivefold").rglob("*.py")):
        parts = path.relative_to(ROOT / "fivefold").with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


class _Class(NamedTuple):
    name: str
    lines: int
    docstring: str


class _Module(NamedTuple):
    """What is read of a file; its tree would be looked through by every garbage collection."""

    at_start: set[str]
    """Modules of this project that it imports when it is imported itself."""
    imports: set[str]
    """Those, and what its functions import later."""
    classes: list[_Class]


@cache
def _module(name: str) -> _Module:
    found = _Module(set(), set(), [])
    within = (ast.stmt, ast.excepthandler, ast.match_case)  # expressions have no statements
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(_files()[name].read_text()), True)]
    while nodes:
        node, at_start = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno
            found.classes.append(_Class(node.name, lines, ast.get_docstring(node) or ""))
        used = {*_imported(name, node)}
        found.imports.update(used)
        found.at_start.update(used if at_start else ())
        at_start &= not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        each = ast.iter_child_nodes(node)
        nodes.extend((inner, at_start) for inner in each if isinstance(inner, within))
    return found


def _imported(name: str, node: ast.AST) -> Iterator[str]:
    """The modules of this project that a statement imports."""
    full: list[str] = []
    if isinstance(node, ast.Import):
        full = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, f"{name}: relative import"
        full = [f"{node.module}.{alias.name}" for alias in node.names]
    for each in full:
        top, _, inner = each.partition(".")
        if top == "fivefold":
            yield inner if inner in _files() else inner.rpartition(".")[0]


def _room(module: str) -> str:
    return module.partition(".")[0]


def _covered(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def test_every_room_has_a_floor() -> None:
    assert {_room(name) for name in _files() if name} <= set(FLOORS)


def test_rooms_import_from_above_only() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in _files()
        if name
        for other in _module(name).imports
        if other and FLOORS.index(_room(other)) > FLOORS.index(_room(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: _module(name).at_start - {name} for name in _files()}
    TopologicalSorter(graph).prepare()


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for module in _files():
        for each in _module(module).classes:
            places.setdefault(each.name, []).append(module)
    # The module of every verb has a `run`, and its `Options`.
    places["Options"] = [name for name in places["Options"] if _room(name) != "cli"]
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_planning_and_training_do_not_import_each_other() -> None:
    planning = {"predict", "search", "tell", "published"}
    for rooms, others in ((planning, {"train"}), ({"train"}, planning)):
        names = [name for name in _files() if _room(name) in rooms]
        used = {_room(d) for name in names for d in _module(name).imports}
        assert not others & used


# A class this long must say in its docstring why it is not several.
MAX_CLASS_LINES = 200
REASON = "One class because"
REASONS = {
    "config.architecture.Architecture": "the settings of one section, most of it their help texts",
    "counts.volumes._Volumes": "a method for each formula; all share the sizes of one rank",
}


def test_a_long_class_says_why() -> None:
    long = [
        f"{module}.{each.name}"
        for module in _files()
        for each in _module(module).classes
        if each.lines >= MAX_CLASS_LINES and REASON not in " ".join(each.docstring.split())
    ]
    assert set(long) == set(REASONS)


MAX_FILE_LINES = 400
LONG_FILES = {"config.presets": "a table of models"}


def test_files_are_read_in_one_sitting() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in _files().items()}
    assert {module for module, count in lines.items() if count > MAX_FILE_LINES} == {*LONG_FILES}


def _torch_free() -> list[str]:
    return [n for n in _files() if _covered(n, TORCH_FREE) and not _covered(n, WITH_TORCH)]


@pytest.mark.parametrize("modules", ["all", "check"])
def test_torch_stays_out(modules: str) -> None:
    """One interpreter for all, so that the first import of torch is named; one for the time."""
    names = _torch_free() if modules == "all" else ["config", "check"]
    assert "config.config" in _torch_free()
    script = f"""
import importlib, sys, time
for name in {names!r}:
    importlib.import_module("fivefold." + name)
    assert "torch" not in sys.modules, f"fivefold.{{name}} loads torch"
print(time.process_time())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if modules == "check":
        assert float(done.stdout) < START_SECONDS


def test_every_file_of_a_room_is_in_the_wheel() -> None:
    """setuptools takes modules by itself, and of other files those that `package-data` names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["fivefold"]
    package = ROOT / "fivefold"
    others = [
        path.relative_to(package)
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert others
    assert not [path for path in others if not any(path.match(each) for each in patterns)]
    rooms = {path.parent for path in package.rglob("*.py")}
    assert not [room for room in rooms if not (room / "__init__.py").exists()]
