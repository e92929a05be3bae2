import csv
import json
import re

import pytest

from fivefold.check import check
from fivefold.cli import schedule
from fivefold.cli.main import main
from fivefold.config.sources import read_config, to_toml
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.measured import FILE, MeasuredAct
from fivefold.pipeline.draw.study import Study
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.pipeline.simulate import simulate
from tests.pipeline.test_measured import acts_of, write_measured


def said(capsys, *argv):
    assert main(["schedule", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys, *argv):
    assert main(["schedule", *argv]) == 2
    return capsys.readouterr().err


def test_without_a_name_it_lists_all(capsys):
    lines = said(capsys).splitlines()
    assert [line.split()[0] for line in lines[: len(SCHEDULES) + 1]] == [*SCHEDULES, "auto"]
    assert any(line.startswith("try:") for line in lines)


def test_a_picture_a_legend_and_figures(capsys):
    text = said(capsys, "1f1b", "--stages", "2", "--microbatches", "2")
    assert "rank 0 F0-F1-......B0----...B1----" in text
    assert "F forward; B backward, dX and dW in one; number = microbatch" in text
    assert re.search(r"flush makespan +9 ", text)
    assert "\033" not in text


@pytest.mark.parametrize(
    "chunks, told",
    [
        (2, "a b = first, second stage"),
        (3, "a b c = first, second, third stage"),
        (4, "a b c = first, second, third, ... stage"),
    ],
)
def test_the_legend_names_the_stages_that_a_rank_has(chunks, told, capsys):
    how = ["--chunks", str(chunks), "--stages", "2", "--microbatches", "2"]
    assert f"; number = microbatch, {told} of the rank" in said(capsys, "interleaved_1f1b", *how)


@pytest.mark.parametrize("name", ["zb-v", "ZB_V", "zb_v"])
def test_names_are_read_as_they_are_written_elsewhere(name, capsys):
    told = json.loads(said(capsys, name, "--stages", "8", "--microbatches", "24", "--json"))
    assert told["schedule"] == "zb_v"
    assert told["flush_makespan"] == told["lower_bound"] == 75.5
    assert told["span"] == 72 and told["span_bubble"] == 0 and told["peak_in_flight"] == 8


def test_every_file_is_written_and_the_tables_are_read_again(capsys, tmp_path):
    files = {flag: tmp_path / f"out{flag}" for flag in ("svg", "html", "csv", "torch-csv", "trace")}
    flags = [word for flag, path in files.items() for word in (f"--{flag}", str(path))]
    costs = ["--costs", "1,1.5,0.5", "--latency", "0.25"]
    first = json.loads(said(capsys, "dualpipe_v", *costs, "--json", *flags))
    assert files["svg"].read_text().startswith("<svg")
    assert files["html"].read_text().startswith("<!doctype html>")
    assert json.loads(files["trace"].read_text())["traceEvents"]
    for flag in ("csv", "torch-csv"):
        again = json.loads(said(capsys, str(files[flag]), *costs, "--json"))
        assert again["flush_makespan"] == first["flush_makespan"]
        assert again["peak_in_flight"] == first["peak_in_flight"]
    assert not list(tmp_path.glob(".tmp*"))


def test_the_comparison_as_text_json_and_picture(capsys, tmp_path):
    svg = tmp_path / "all.svg"
    text = said(capsys, "--compare", "--stages", "2", "--microbatches", "4", "--svg", str(svg))
    assert text.startswith("2 ranks, 4 microbatches, a rank's F 1 B 1 W 1, latency 0")
    assert svg.read_text().count('class="t"') == len(SCHEDULES) + 1
    told = json.loads(said(capsys, "--compare", "--stages", "2", "--microbatches", "4", "--json"))
    assert {entry["schedule"] for entry in told} == {*SCHEDULES, "auto"}


def test_a_long_comparison_says_so_first(capsys, monkeypatch):
    for long, told in ((8, True), (9, False)):
        monkeypatch.setattr(schedule, "LONG", long)
        assert main(["schedule", "--compare", "--stages", "2", "--microbatches", "4"]) == 0
        said = capsys.readouterr().err
        assert (f"times {len(SCHEDULES) + 1} schedules, of 2 ranks, 4 microbatches" in said) is told


def test_a_profiled_run_beside_its_simulation(capsys, tmp_path):
    _, acts = acts_of("1f1b", Study(2, 4))
    write_measured(tmp_path / FILE, acts)
    text = said(capsys, str(tmp_path))
    assert "measured" in text and "the same simulated" in text and text.count("rank 1 ") == 2


def test_a_model_is_cut(capsys):
    flags = "--balance deepseek-v3 --stages 16 --chunks 2 --layer-costs"
    costs = "dense=0.55,mtp=1.8,head=0.7"
    text = said(capsys, *flags.split(), costs)
    assert "61 layers in 32 stages" in text and "largest load 1.0298 x mean" in text
    told = json.loads(said(capsys, *flags.split(), costs, "--json"))
    assert told["layout"].startswith("E") and sum(told["layers"]) == 61
    drawn = said(capsys, "zb_v", "--balance", "debug-llama", "--stages", "2")
    assert "rank 0  E" in drawn and "flush makespan" in drawn


def test_a_model_is_cut_by_the_times_of_a_run(capsys, tmp_path):
    """Embedding 1 s, a layer 2 s, the head 4 s: 1 + 5 x 2 = 11 and 3 x 2 + 4 = 10 are best."""
    run = read_config(
        model="debug-llama",
        num_layers=6,
        pipeline_model_parallel_size=3,
        pipeline_model_parallel_layout="Ett|ttt|tL",
        global_batch_size=8,
    )
    forward = (5.0, 6.0, 6.0)
    program = eager_dx(check(run, 3).order().program())
    timeline = simulate(program, Costs(forward, forward, forward, 0.25)).timeline
    acts = [
        MeasuredAct(rank, str(t.act.kind), t.act.stage, t.act.mb, t.start, t.end)
        for rank, row in enumerate(timeline)
        for t in row
    ]
    write_measured(tmp_path / FILE, acts)
    (tmp_path / "config.toml").write_text(to_toml(check(run, 3).config))
    flags = ["--balance", "debug-llama", "--stages", "2", "--measured", str(tmp_path)]
    told = json.loads(said(capsys, *flags, "--json"))
    loads = {"E": 1.0, "t": 2.0, "L": 4.0}
    layers = told["layers"]
    assert told["loads"] == pytest.approx(
        [3 * (loads["E"] + 2 * layers[0]), 3 * (2 * layers[1] + loads["L"])]
    )
    assert layers[0] - layers[1] in (1, 2)
    text = said(capsys, "1f1b", *flags)
    assert "a message 250 ms" in text and "latency 0.25" in text
    assert "latency 0\n" in said(capsys, "1f1b", *flags, "--latency", "0")
    for costs in (["--layer-costs", "head=1"], ["--costs", "1,2,1"]):
        assert "--measured gives all costs" in refused(capsys, *flags, *costs)
    other = ["--balance", "gpt2", "--stages", "2", "--measured", str(tmp_path)]
    assert "tells nothing about this model's" in refused(capsys, *other)
    # Later the run has gone on with other stages.
    (tmp_path / "profile").mkdir()
    (tmp_path / "config.toml").rename(tmp_path / "profile" / "config.toml")
    for text in ("E|ttt|tttL", "E|tt|t|tt|tL|"):
        split = {"pipeline_model_parallel_layout": text, "pipeline_schedule": "gpipe"}
        later = run.with_values(**split)
        (tmp_path / "config.toml").write_text(to_toml(check(later, 3).config))
        assert json.loads(said(capsys, *flags, "--json")) == told
    (tmp_path / "profile" / "config.toml").unlink()
    assert "was profiled with stages other than" in refused(capsys, *flags)


@pytest.mark.parametrize(
    ("line", "reasons"),
    [
        ("zbv", ["unknown schedule 'zbv', did you mean 'zb_v'?", "interleaved_1f1b"]),
        ("nothing.csv", ["cannot read nothing.csv"]),
        ("no/such/folder", ["unknown schedule"]),
        (
            "1f1b --stages 0 --microbatches 0 --chunks 0 --latency -1 --memory-cap 0",
            [
                "--stages must be at least 1",
                "--microbatches must be at least 1",
                "--chunks must be at least 1",
                "--latency must be 0 or more",
                "--memory-cap must be positive",
            ],
        ),
        (
            "1f1b --costs 1,2 --compare --dx-first",
            ["--costs must be three times F,B,W, not '1,2'", "--compare shows both orders"],
        ),
        ("1f1b --costs 0,1,1", ["--costs must be three times"]),
        ("1f1b --costs 1,nan,1", ["--costs must be three times"]),
        ("1f1b --microbatches 1000000", ["too many to draw", "at most 262,144"]),
        ("1f1b --chunks 2", ["runs one stage per rank", "interleaved_1f1b"]),
        ("1f1b --memory-cap 2", ["holds 4 microbatches, the cap is 2"]),
        ("auto --memory-cap 0.5", ["rank 0 holds 1 for one microbatch, the cap is 0.5"]),
        ("dualpipe_v --microbatches 4", ["needs at least 8 microbatches, not 4"]),
        ("1f1b --layout Et", ["--layout needs a model", "--balance"]),
        ("1f1b --measured runs/latest", ["--measured needs a model", "whose layers are those"]),
        (".", ["holds no profiled step", "train ... --profile"]),
        ("--balance gpt2 --measured runs/none", ["runs/none is not a run folder"]),
        ("--balance no-model", ["unknown model 'no-model'"]),
        ("--balance gpt2 --layout Et*12)L", ["never opened", "       ^"]),
        ("--balance gpt2 --layer-costs moe", ["'moe' states no cost"]),
        ("--balance gpt2 --memory-gib 0.1", ["no cut of the model fits"]),
        ("dualpipe --torch-csv x.csv", ["does not support two copies"]),
        ("--compare --csv x.csv", ["write one schedule"]),
        ("1f2b --compare", ["shows all schedules, not 1f2b", "--no-compare"]),
        ("--compare --dx-first", ["both orders", "--no-dx-first"]),
        ("1f1b --seq-length 128", ["--seq-length needs a model"]),
        ("--balance gpt2 --svg x.svg", ["--svg is of a schedule", "works: 1f1b | --compare"]),
        ("--csv x.csv", ["--csv is of a schedule", "works: 1f1b"]),
        ("--stages 8 --json", ["--stages is of a schedule", "--json is of a schedule"]),
        ("1f1b --svg /proc/none/x.svg", ["cannot write /proc/none/x.svg"]),
    ],
)
def test_mistakes_are_explained(line, reasons, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused(capsys, *line.split())
    for reason in reasons:
        assert reason in error
    assert not list(tmp_path.iterdir())


def test_tables_can_be_opened_elsewhere(capsys, tmp_path):
    file = tmp_path / "acts.csv"
    said(capsys, "gpipe", "--csv", str(file))
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 2 * 4 * 8
    assert max(float(row["end"]) for row in rows) == 33
