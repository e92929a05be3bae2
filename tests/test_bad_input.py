"""Whatever is wrong, the answer is quick, says the sum or the nearest word, and starts nothing.

All cases of `tests/cli/bad_cases.py` go through the real entry point in one fresh interpreter, so
that it can be seen after each that neither torch nor the launcher has been loaded.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.bad_cases import CASES, Case

ROOT = Path(__file__).parents[1]
FORBIDDEN = ("torch", "fivefold.train.ranks.launch", "fivefold.train.run")
SECONDS = 0.5  # of processor time for one answer
ASKS_HUB = "hub typo"  # which takes the hub's own library: a third of a second, not of ours

RUNNER = """
import contextlib, io, json, os, sys, time
from fivefold.cli.main import main

for line in sys.stdin:
    case = json.loads(line)
    os.chdir(case["folder"])
    os.environ.update(case["env"])
    if case["asks_hub"]:
        from huggingface_hub import HfApi, errors, snapshot_download
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(case["argv"])
        except BaseException as error:
            status = repr(error)
    seconds = time.process_time() - began
    for name in case["env"]:
        del os.environ[name]
    loaded = [name for name in case["forbidden"] if name in sys.modules]
    print(json.dumps([status, out.getvalue(), err.getvalue(), seconds, loaded]))
"""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Answer:
    status: int | str
    out: str
    err: str
    seconds: float
    loaded: list[str]


def environment(home: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("SLURM_")
    }
    return kept | {"PYTHONPATH": str(ROOT), "HOME": str(home)}


def prepare(case: Case, folder: Path) -> list[str]:
    """Write the case's files; returns its command line."""
    files = dict(case.files)
    if case.recipe is not None:
        files["recipe.toml"] = case.recipe
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return shlex.split(case.argv.replace("RECIPE", "recipe.toml"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    root = tmp_path_factory.mktemp("bad_input")
    lines = []
    for number, case in enumerate(CASES):
        folder = root / str(number)
        folder.mkdir()
        argv = prepare(case, folder)
        line = {"argv": argv, "folder": str(folder), "env": case.env, "forbidden": FORBIDDEN}
        lines.append(json.dumps(line | {"asks_hub": case.name == ASKS_HUB}))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=root,
        env=environment(root),
    )
    assert done.returncode == 0, done.stderr
    told = [Answer(*json.loads(line)) for line in done.stdout.splitlines()]
    return {case.name: answer for case, answer in zip(CASES, told, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_answered(case: Case, answers: dict[str, Answer]) -> None:
    answer = answers[case.name]
    assert answer.status == 2, (answer.status, answer.out, answer.err)
    assert re.search(r"^error: ", answer.err, re.MULTILINE)  # after what was done, if any
    assert not answer.out
    for part in case.says:
        assert part in answer.err
    assert "Traceback" not in answer.err
    assert answer.loaded == []
    assert answer.seconds < SECONDS


def test_kinds_are_many_and_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 70


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        ("train debug --tp 3 --nproc 4", 2, "", "4 / 3 = 1.333"),
        ("train nothing", 2, "", "unknown recipe 'nothing'"),
        ("train debug --data-path gone --nproc 2", 2, "", "no such file or folder: gone"),
        ("trian", 2, "", "did you mean 'train'?"),
        ("--version", 0, r"fivefold \d+\.\d+", ""),
    ],
)
def test_the_process_leaves_as_its_answer_says(
    argv: str, status: int, out: str, err: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "fivefold", *argv.split()]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path)
    )
    assert done.returncode == status
    assert re.search(out, done.stdout)
    assert err in done.stderr
    assert "\033" not in done.stderr
    assert "Traceback" not in done.stderr
