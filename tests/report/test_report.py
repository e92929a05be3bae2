"""Pages of runs: their data are the run's, whatever its files hold, and a browser draws them."""

import errno
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fivefold.cli import watch
from fivefold.cli.main import main
from fivefold.cli.watch import sparkline, view
from fivefold.config.sources import read_config, to_toml
from fivefold.errors import DataError
from fivefold.report import history
from fivefold.report.charts import LAST, MOST_POINTS, charts_of
from fivefold.report.facts import facts
from fivefold.report.history import read_history
from fivefold.report.page import page
from fivefold.report.settings import run_settings

CHARTS = re.compile(r'const DATA = (\{"runs".*\});')


def a_run(folder: Path, steps: int = 5, **values: Any) -> Path:
    """The files of a run that did not happen."""
    folder.mkdir(parents=True)
    config = read_config("debug", train_iters=10, lr_warmup_iters=0, **values)
    (folder / "config.toml").write_text(to_toml(config))
    start = {"time": "2026-11-22T10:00:00+00:00", "command": ["fivefold", "train"], "host": "here"}
    (folder / "environment.json").write_text(json.dumps([start]))
    lines = [
        {"step": step, "loss": 6 - step / 10, "grad_norm": 1.0, "lr": 1e-3, "seconds": 0.5}
        | {"tokens_total": 512 * step, "tokens_per_second": 1024.0, "memory_bytes": 2**30}
        for step in range(1, steps + 1)
    ]
    lines.insert(3, {"step": 3, "eval_loss": 5.5, "eval_perplexity": 244.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def charts_in(text: str) -> dict[str, Any]:
    match = CHARTS.search(text)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_a_page_shows_what_the_files_say(tmp_path: Path) -> None:
    history = read_history(a_run(tmp_path / "run"))
    text = page([history])
    charts = {chart["title"]: chart for chart in charts_in(text)["charts"]}
    loss = charts["Loss"]
    assert loss["steps"] == [1, 2, 3, 4, 5]
    by_name = {line["name"]: line for line in loss["lines"]}
    assert by_name["training"]["values"] == [5.9, 5.8, 5.7, 5.6, 5.5]
    assert by_name["validation"]["values"] == [None, None, 5.5, None, None]
    assert charts["Peak memory of the first rank"]["lines"][0]["values"] == [1.0] * 5
    assert "MFU" not in charts and not any("expert" in title for title in charts)
    for said in (
        "5 of 10",
        "5.5000 after step 3",
        "with <code>--audit</code>",
        "start on here",
    ):
        assert said in text
    assert not re.search(r'(?:src|href)="?http', text)  # needs no network


@pytest.mark.parametrize("git", [None, {"commit": "abc", "dirty": True}])
def test_a_page_is_in_words(git: object, tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run", tensor_model_parallel_size=2, sequence_parallel=True)
    starts = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps([starts[0] | {"git": git}]))
    text = re.sub(r"(?s)<(script|style)>.*?</\1>|<[^>]*>", " ", page([read_history(folder)]))
    assert not re.search(r"\b(None|True|False)\b|\('|',\)", text)


def test_two_runs_share_charts_and_tell_what_differs(tmp_path: Path) -> None:
    one = read_history(a_run(tmp_path / "one"))
    other = read_history(a_run(tmp_path / "other", steps=8, lr=0.004, micro_batch_size=2))
    text = page([one, other])
    loss = charts_in(text)["charts"][0]
    assert loss["steps"] == [*range(1, 9)]
    assert {(line["run"], line["name"]) for line in loss["lines"]} == {
        (0, "one training"),
        (0, "one validation"),
        (1, "other training"),
        (1, "other validation"),
    }
    differ = text[text.index("In which they differ") : text.index("<details>")]
    assert {*re.findall(r"<td>([a-z]\w+\.\w+)</td>", differ)} == {
        "optimizer.lr",
        "training.micro_batch_size",
    }


def test_nothing_in_a_run_can_break_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    folder = a_run(tmp_path / "<b>run", save=evil, data_path=(evil,))
    start = [{"time": "never", "command": [evil], "host": evil, "variables": {"A": evil}}]
    (folder / "environment.json").write_text(json.dumps(start))
    metrics = folder / "metrics.jsonl"
    evaluation = json.dumps({"step": 6, f"eval_loss_{evil}": 5.0})
    metrics.write_text(f"{metrics.read_text()}{evaluation}\n")
    text = page([read_history(folder)])
    assert "alert(1)</script>" not in text and "<b>run" not in text
    assert evil in unescape(text)
    names = {line["name"] for line in charts_in(text)["charts"][0]["lines"]}
    assert f"validation {evil}" in names


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    for name in ("metrics.jsonl", "environment.json"):
        (folder / name).unlink()
    assert "No step has ended yet" in page([read_history(folder)])
    assert view(read_history(folder), 80)[-1] == "no step has ended yet"
    with pytest.raises(DataError, match="is not a run folder"):
        read_history(tmp_path)


def test_a_page_that_cannot_be_written_may_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "report.html").mkdir()  # as good as a disk that is only read
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(folder)]) == 2
    what, attempt = capsys.readouterr().err.splitlines()
    assert what == f"error: cannot write {folder}/report.html: Is a directory"
    flags = attempt.removeprefix("  try:   ").split(",")[0]
    assert main(["report", str(folder), *flags.split()]) == 0
    assert (tmp_path / "report.html").is_file()


def test_what_is_no_run_folder_says_which_one_is_meant(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "my run")
    for inside in ("checkpoints", "checkpoints/step-00000004"):
        (folder / inside).mkdir(exist_ok=True, parents=True)
        with pytest.raises(DataError, match=rf", did you mean '{folder}'\?$"):
            run_settings(folder / inside)
    with pytest.raises(DataError, match=r", did you mean '.*/my run'\?$"):
        run_settings(tmp_path / "my runs")
    hub = tmp_path / "my weights"
    hub.mkdir()
    (hub / "config.json").write_text("{}")
    with pytest.raises(DataError) as caught:
        run_settings(hub)
    command = str(caught.value).split("try:   fivefold convert ")[1].split(", which")[0]
    assert shlex.split(command) == [str(hub), f"{hub}-run"]


NAMES = ("loss", "grad_norm", "lr", "seconds", "mfu", "eval_loss", "tokens_total")
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.one_of(st.none(), st.booleans(), st.text(max_size=3), NUMBERS)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), max_size=8))
@example([{"loss": 1.0, "grad_norm": 1.0, "seconds": 1.7e308}])
def test_any_metrics_make_a_page(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    folder = a_run(tmp_path_factory.mktemp("any") / "run")
    text = "".join(json.dumps({"step": n} | line) + "\n" for n, line in enumerate(lines))
    (folder / "metrics.jsonl").write_text(text)
    history = read_history(folder)
    page([history])
    view(history, 60)


def test_long_runs_are_thinned_and_smoothed(tmp_path: Path) -> None:
    history = read_history(a_run(tmp_path / "run", steps=3 * MOST_POINTS))
    data = charts_in(page([history]))["charts"][0]
    assert len(data["steps"]) <= MOST_POINTS + 1
    lines = {line.name: line for line in charts_of([history])[0].lines}
    smooth, raw = lines[f"training, mean of {LAST} steps"].values, lines["training"].values
    last = [*raw.values()][-LAST:]
    assert smooth[max(smooth)] == pytest.approx(sum(last) / LAST)


def test_watch_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run", steps=10)
    assert main(["watch", str(folder), "--once"]) == 0
    out = capsys.readouterr().out
    assert "10 of 10" in out and out.rstrip().endswith("finished")
    assert max(map(len, out.splitlines())) <= 80
    assert sparkline([1.0] * 5, 10) == "▁▁▁▁▁"
    silent = view(read_history(a_run(tmp_path / "other")), 80)[-1]
    assert silent.startswith("2.5") and "left; last step" in silent


def test_a_reader_of_watch_who_has_gone_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Unread())
    with pytest.raises(BrokenPipeError):
        watch.run([str(a_run(tmp_path / "run")), "--once"])


def test_a_start_shows_its_command_as_it_is_typed(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    words = ["fivefold", "train", "debug", "--data-path", "my texts", "--split", "$(x)"]
    starts = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps([starts[0] | {"command": words}]))
    told = [each.details for each in read_history(folder).happenings if "start" in each.what]
    assert [shlex.split(line) for line in told] == [words]


@pytest.mark.parametrize("steps", [5, 30])
def test_a_mean_names_the_steps_it_is_of(steps: int, tmp_path: Path) -> None:
    history = read_history(a_run(tmp_path / "run", steps=steps))
    assert f"loss, mean of the last {min(steps, LAST)} steps" in dict(facts([history]))


def test_report_writes_where_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/report.html\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(folder), "--html", str(folder / "metrics.jsonl" / "x")]) == 2


@pytest.mark.slow
def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser here")
    file = tmp_path / "page.html"
    file.write_text(page([read_history(a_run(tmp_path / name)) for name in ("one", "two")]))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000")
    done = subprocess.run(
        [browser, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count('class="u-wrap"') == len(charts_in(file.read_text())["charts"])


def test_only_checkpoints_that_can_be_loaded_are_events(tmp_path: Path) -> None:
    """None that a killed run left unfinished; nor does a file of another kind stop the page."""
    folder = a_run(tmp_path / "run")
    for name in ("step-00000000", "step-00000120", "step-00000007.old", "step-00000009.tmp"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "step-00000009.old.tmp" / "manifest.json").mkdir(parents=True)
    (folder / "errors" / "rank-0.txt").mkdir(parents=True)
    told = {each.what for each in read_history(folder).happenings}
    assert told - {"start on here (CPU)"} == {f"checkpoint of step {n}" for n in (0, 7, 120)}


def test_a_checkpoint_that_is_removed_meanwhile_is_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path / "run")
    manifest = folder / "checkpoints" / "step-00000010" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    changed = history._changed

    def slow(path: Path) -> Any:
        if path == manifest:
            shutil.rmtree(manifest.parent)
        return changed(path)

    monkeypatch.setattr(history, "_changed", slow)
    assert len(read_history(folder).happenings) == 1


@pytest.mark.parametrize(
    ("name", "damage", "said", "left"),
    [
        ("environment.json", lambda text: '[{"command": 5}]', "Expected `array`, got `int`", 5),
        ("metrics.jsonl", lambda text: text.replace("}", "", 1), "metrics.jsonl:1 is not JSON", 4),
    ],
)
def test_damaged_files_say_how_to_go_on(
    tmp_path: Path, name: str, damage: Callable[[str], str], said: str, left: int
) -> None:
    folder = a_run(tmp_path / "my run")
    (folder / name).write_text(damage((folder / name).read_text()))
    with pytest.raises(DataError, match=said) as caught:
        read_history(folder)
    attempt = str(caught.value).split("try: ")[-1]
    subprocess.run(attempt, shell=True, check=True)
    assert len(read_history(folder).steps) == left
