"""The short form of a plan: what it suggests works when typed, and lines fit the terminal."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.tell import columns
from fivefold.tell.answer import next_commands
from tests.search.once import searching_once
from tests.search.test_search import result_of

QUESTIONS = (
    "debug --gpus 1 --gbs 8 --seq-length 256",
    "debug-mixtral --cluster A100 --gpus 2 --gbs 8 --seq-length 256 --tp 2",
    "gpt2 --cluster H100 --gpus 16 --gbs 64",
    "--model debug-llama --cluster H100 --gpus 9 --gbs 9 --seq-length 256",
    "gpt2 --cluster GB200 --gpus 8 --gbs 64 --rules --top 2 --train_tokens 1T",
)
SETTINGS = ("tp=2", "pp=2 dp_shard=1", "micro_batch_size=2", "tp=4 cp=2")


@pytest.fixture(scope="module", autouse=True)
def _searched_once() -> Iterator[None]:
    with searching_once():
        yield


def _said(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(shlex.split(line)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_comes_next_works_when_typed(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    text = _said(f"plan {question}", capsys)
    commands = text.partition("\nnext\n")[2].splitlines()
    make, run, *more = (command.removeprefix("fivefold ") for command in commands)
    line, _, recipe = make.partition(" > ")
    Path(recipe).write_text(_said(line, capsys))
    assert recipe in run
    dry = "" if run.startswith("launch") or "--dry-run" in run else " --dry-run"
    _said(run + dry, capsys)
    assert len(more) == 2
    if question == QUESTIONS[0]:  # the same words with another flag
        told = [_said(command, capsys) for command in more]
        assert "memory by pipeline rank" in told[0] and list(Path().glob("*.html"))


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("gpt2", "gpt2-8.toml"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b-8.toml"),
        ("my models/Llama X/config.json", "llama-x-8.toml"),
        ("my models/Llama X/", "llama-x-8.toml"),
        ("recipes/Mine.toml", "mine-8.toml"),
    ],
)
def test_the_recipe_is_named_after_the_model(model: str, recipe: str) -> None:
    result = result_of("gpt2 --gpus 8 --gbs 64 --tp 2 --pp 2 --mbs 1 --seq-length 256")
    words = [model, "--top", "3", "--html=x.html", "--rules"]
    make, run, *more = next_commands(result, model, words)
    assert [line.split()[-1] for line in more] == ["--verbose"], "the page is there"
    assert make == f"fivefold plan {shlex.quote(model)} --emit fivefold > {recipe}"
    assert run == f"fivefold train {recipe} --nproc 8"


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 83, 140])
def test_lines_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    size = os.terminal_size((width, 9))
    monkeypatch.setattr(columns.shutil, "get_terminal_size", lambda *_, **__: size)
    monkeypatch.setattr(columns.sys.stdout, "isatty", lambda: True, raising=False)
    text = re.sub("\x1b\\[\\d+m", "", _said("plan gpt2 --gpus 16 --gbs 64 --cp 1", capsys))
    lines = text.partition("\nnext\n")[0].splitlines()
    assert max(map(len, lines)) <= width
    longest = max(len(line) for line in lines if line.startswith(("layout ", "step ")))
    assert longest > width - 25, "room is used"


@pytest.mark.slow
def test_why_answers_in_five_lines_and_repeats_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(columns, "line_width", lambda: 10_000)
    asked = "plan gpt2 --gpus 8 --gbs 32 --pipeline-schedule 1f1b"
    answer = set(_said(asked, capsys).splitlines())
    for words in SETTINGS:
        lines = _said(f"{asked} --why '{words}'", capsys).splitlines()
        assert 2 <= len(lines) <= 5 and words in lines[0]
        assert not answer & set(lines)


@pytest.mark.slow
def test_json_has_what_was_asked(capsys) -> None:
    told = json.loads(_said("plan gpt2 --gpus 8 --gbs 64 --json --rules --why tp=4", capsys))
    best, other, rule = told["layouts"][0], told["why"], told["rules"]
    assert other["with"] == "tp=4" and other["settings"]["tensor_model_parallel_size"] == 4
    for each in (other, rule):
        assert each["slower"] == pytest.approx(each["step_seconds"] / best["step_seconds"] - 1)
    assert rule["steps"] and rule["slower"] >= 0


@pytest.mark.parametrize("output", ["--emit fivefold", "--json", "--why tp=2"])
@pytest.mark.parametrize(
    "detail",
    ["--rules", "--guide", "--verbose", "--why tp=2", "--train-tokens 1T", "--top 9"],
)
def test_nothing_is_asked_for_in_vain(output: str, detail: str, capsys) -> None:
    """A question that another flag would silence is refused, and all else is printed."""
    silent = {("--json", "--verbose")}
    silent |= {("--why tp=2", of) for of in ("--verbose", "--train-tokens 1T", "--top 9")}
    if output == detail:
        return
    refused = output.startswith("--emit") or (output, detail) in silent
    line = f"plan debug --gpus 1 --gbs 8 --seq-length 256 {output} {detail}"
    status = main(shlex.split(line))
    said = capsys.readouterr()
    assert status == (2 if refused else 0), said.err
    if refused:
        assert detail.split()[0] in said.err and "works:" in said.err


def test_pipes_have_lines_of_one_length() -> None:
    assert not sys.stdout.isatty() and columns.line_width() == columns.WIDTH
