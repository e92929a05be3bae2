"""Cluster files, calibrated ones and tables of published runs, damaged in two thousand ways, and
in five thousand with `-m exhaustive`.

Each is read, or refused as an error for people; what is read predicts steps of some length.
"""

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest

from fivefold.errors import ConfigError, DataError
from fivefold.hardware import Gpu, Rates
from fivefold.predict.cluster import Cluster, Link, preset
from fivefold.predict.cluster_file import load_cluster, to_toml
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict
from fivefold.published.row import COLUMNS, OPTIONAL, RANGES, read_rows
from fivefold.published.score import report
from tests.mutations import mutations
from tests.predict.layouts import planned

COUNTS = pytest.mark.parametrize(
    "count", [1_000, pytest.param(5_000, marks=pytest.mark.exhaustive)]
)
PARTIAL = """
preset = "H100"
num_gpus = 16
jitter = 0.01
[gpu]
sustained = 0.9
multiprocessors = 132
[gpu.matmul]
bf16 = 7.2e14
[network_link]
bandwidth = 50e9
latency = 6e-6
"""
_RATES = Rates(bf16=4.1e10, fp32=9.3e10, fp64=4.4e10)
CALIBRATED = "# measured 2026-11-22 by fivefold plan --calibrate\n\n" + to_toml(
    Cluster(
        "2 x CPU, 1 threads a rank",
        Gpu("CPU", 3.3e10, 1.1e10, _RATES, _RATES, 1, 0.97, attention_forward=0.3, launch=2e-6),
        num_gpus=2,
        gpus_per_node=2,
        node_link=Link(8.1e8, 1.2e-4, 1.0),
        network_link=Link(8.1e8, 1.2e-4, 1.0),
        host_bandwidth=6e9,
        jitter=0.08,
    )
)
SMALL = planned("debug-llama", 2, tp=2, gbs=2, seq=64)


@pytest.mark.slow
@COUNTS
@pytest.mark.parametrize("text", [PARTIAL, CALIBRATED], ids=["ours", "calibrated"])
def test_a_cluster_is_one_that_predicts_or_is_refused(
    text: str, count: int, tmp_path: Path
) -> None:
    path, read = tmp_path / "cluster.toml", 0
    for data in mutations(text, count):
        path.write_bytes(data)
        try:
            cluster = load_cluster(path)
        except ConfigError as error:
            assert str(path) in str(error) or "cluster" in str(error), data
            continue
        read += 1
        if read % 4:  # the others as well would take half a minute
            continue
        step = predict(SMALL, replace(cluster, num_gpus=max(2, cluster.num_gpus)))
        assert 0 < step.step_time < 1e12 and isfinite(step.mfu) and step.mfu > 0, data
        assert isfinite(peak_memory(SMALL, cluster).device_total), data
    assert count / 20 < read < count / 2


CELLS = {
    "src": "ours",
    "gpu": "H100",
    "ngpu": "2",
    "model": "tiny",
    "L": "2",
    "h": "64",
    "ffn": "192",
    "heads": "4",
    "kv": "2 (4)",
    "vocab": "512",
    "seq": "64",
    "gbs": "4",
    "mbs": "1",
    "tp": "2",
    "pp": "1",
    "vpp": "n/a",
    "zero": "1",
    "recomp": "full",
    "prec": "bf16",
    "step_s": "0.02",
    "mem": "0.5",
    "mem_unit": "GiB max_allocated",
}


def table(*rows: dict[str, str]) -> str:
    names = [*COLUMNS, *(name for name in OPTIONAL if any(name in row for row in rows))]
    lines = [",".join(names), *(",".join(row.get(c, "") for c in names) for row in rows)]
    return "\n".join(lines) + "\n"


def not_a_number(word: str) -> None:
    raise AssertionError(word)


@pytest.mark.slow
@COUNTS
def test_a_table_of_runs_is_scored_or_refused(count: int, tmp_path: Path) -> None:
    path, read, scored = tmp_path / "runs.csv", 0, 0
    text = table(CELLS, CELLS | {"prec": "fp8", "step_s": "", "tps_gpu": "9000"})
    for data in mutations(text, count):
        path.write_bytes(data)
        try:
            read_rows(path)
        except DataError as error:
            assert str(path) in str(error), data
            continue
        read += 1
        if read % 4:  # the others as well would take half a minute
            continue
        found = report(path)
        json.loads(found.as_json(), parse_constant=not_a_number)
        assert found.table() or not data.strip()
        scored += bool(found.rows)
    assert count / 20 < scored < read < count * 3 / 4


@pytest.mark.parametrize("column", RANGES)
@pytest.mark.parametrize("cell", ["inf", "-1", "1e999", "many", "1e-320", "nan", "9" * 5_000])
def test_a_cell_that_its_column_is_not_for_is_named(column: str, cell: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table(CELLS, CELLS | {column: cell}))
    with pytest.raises(DataError, match=rf"runs\.csv:3: {column} must be a .*number from"):
        read_rows(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (table(CELLS).replace("gbs", "tp"), "no column gbs"),
        (table(CELLS).replace("src,", "src,src,"), "more than once"),
        (table(CELLS).replace("note", "note,colour"), "unknown column 'colour'"),
        (table(CELLS).replace("note", "note,releese"), "did you mean 'release'?"),
        (table(CELLS) + "ours,1\n", ":3: 2 cells, and there are 35 columns"),
        (table(CELLS) + '"', "cannot read"),
        (table(CELLS) + "\0", "zero byte in line 3"),
        (table(CELLS).encode() + b"\xff", "UTF-8"),
        ("", "no column src"),
        (table(CELLS).replace(",", ";"), "columns that ';' separates"),
        (table(CELLS).replace(",", "\t"), "separates, where commas must"),
    ],
)
def test_a_table_of_another_shape_is_refused(text: str | bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as raised:
        read_rows(path)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "written",
    [
        "\ufeff" + table(CELLS),
        table(CELLS).replace("\n", "\r\n"),
        table(CELLS).replace(",", ", "),
        table(CELLS) + "\n" + "," * (len(COLUMNS) - 1) + "\n  \n",
        '"' + table(CELLS).strip().replace(",", '","').replace("\n", '"\n"') + '"\n',
    ],
    ids=["mark", "windows", "padded", "blank lines", "quoted"],
)
def test_a_table_is_the_same_however_a_program_writes_it(written: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(written.encode())
    (row,) = read_rows(path)
    assert {name: row.cells[name].strip() for name in CELLS} == CELLS


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        ("prec", "int3", "prec must be"),
        ("zero", "7", "zero must be"),
        ("recomp", "everything", "recomp: 'everything' is none of"),
        ("mem_unit", "stones", "mem_unit 'stones'"),
        ("gpu", "abacus", "unknown cluster 'abacus'"),
        ("grads", "int8", "grads must be one of"),
        ("attention", "fast", "attention must be one of"),
        ("framework", "torchtitn", "or empty, did you mean 'torchtitan'?"),
        ("E", "8", "a model with experts must be a preset: 'tiny', no preset"),
        ("zero", "hsdp", "such as HSDP 8x16"),
    ],
)
def test_a_word_that_is_not_understood_is_said_beside_the_row(
    column: str, cell: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table(CELLS, CELLS | {column: cell}))
    found = report(path)
    ((told, why),) = found.skipped
    assert told.line == 3 and says in why
    assert [scored.row.line for scored in found.rows] == [2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gpu]\nmemory_bytes = 1e9\n", "leave nothing of gpu.memory_bytes"),
        ("[gpu.matmul]\nbf16 = 2e15\n", "gpu.matmul.bf16 2e+15 exceeds gpu.peak.bf16"),
        ("gpu = 'A100'\n", "both name what to start from"),
        ("num_gpus = 0\n", "num_gpus must be a whole number from 1"),
        ("num_gpus = true\n", "num_gpus must be a whole number from 1"),
        ("node_link = 5\n", "node_link must be a table"),
        ("name = 5\n", "name must be text"),
        (f"jitter = {'9' * 5_000}\n", "not TOML"),
        (f"jitter = {'[' * 5_000}{']' * 5_000}\n", "nested too deep"),
        (b"name = '\xff'\n", "is not UTF-8"),
    ],
)
def test_what_no_cluster_can_be_is_named(text: str | bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(b"preset = 'H100'\n" + data)
    with pytest.raises(ConfigError) as raised:
        load_cluster(path)
    assert says in str(raised.value)


def test_a_gpus_name_may_be_written_in_any_letters(tmp_path: Path) -> None:
    cluster = replace(preset("H100"), name='\N{ROCKET} "ours" \\ \N{SNOWMAN}')
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster
