"""Traces of torch's profiler: actions and messages keep their names, ranks become one trace."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.cli.profile import shown
from fivefold.config.sources import to_toml
from fivefold.errors import ConfigError, DataError
from fivefold.pipeline.ir import COMPUTE, Act, Kind, pair
from fivefold.report.traces import merged, read_traces
from fivefold.train.engine import Engine
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.profile import _forget, _is_whole, check_profiler, profiled
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import run
from tests.train.test_profile import settings
from tests.verify.cases import shared_groups


def _step(rank: int, world: int, folder: Path) -> None:
    config = settings("1f1b").with_values(use_pytorch_profiler=True, profile_ranks=(0, 1))
    config = config.with_values(num_layers=2, global_batch_size=8)  # four microbatches
    with shared_groups():
        engine = Engine(check(config, world), rank, torch.device("cpu"))
        batch = global_batch(config, 0)
        rows = microbatches(config, batch, slice(0, config.training.global_batch_size))
        with profiled(engine, folder):
            engine.step(rows)
    if rank == 0:
        (folder / "config.toml").write_text(to_toml(config))


@pytest.mark.slow
def test_a_trace_names_actions_and_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(2, _step, tmp_path)
    traces = read_traces(tmp_path)
    assert [trace.rank for trace in traces] == [0, 1]
    size = 2 * 128 * 128 * 4  # a microbatch of hidden states in fp32
    for trace, other in zip(traces, traces[::-1], strict=True):
        count, sent = trace.messages["pp", "send"]
        assert (count, sent) == (4, 4 * size)
        assert trace.messages["pp", "receive"][0] == other.messages["pp", "send"][0]
        assert {*trace.acts} >= {"F", "BW"} or {*trace.acts} >= {"F", "B", "W"}
        assert 0 < sum(trace.acts.values()) < trace.seconds
        assert 0 < sum(trace.operations.values()) < 3 * trace.seconds
    assert main(["profile", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"pp +send +4 x +512 KiB sent", out)
    whole = json.loads((RunFolder(tmp_path).profile / "trace.json").read_text())
    assert {event["pid"] for event in whole["traceEvents"]} == {0, 1}
    names = {event["args"]["name"] for event in whole["traceEvents"] if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1"}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind in COMPUTE])
def test_each_kind_of_action_counts_as_itself(kind: Kind, tmp_path: Path) -> None:
    """Pairs, too, which are named by both of their halves."""
    act = pair(Act(Kind.F, 1, 2), Act(Kind.BW, 0, 1)) if kind is Kind.FB else Act(kind, 3, 1, 1)
    event = {"ph": "X", "cat": "user_annotation", "name": str(act), "ts": 0.0, "dur": 2e6}
    (RunFolder(tmp_path).profile).mkdir()
    (RunFolder(tmp_path).profile / "rank-0.json").write_text(json.dumps({"traceEvents": [event]}))
    (trace,) = read_traces(tmp_path)
    assert trace.acts == {"F&B" if kind is Kind.FB else str(kind): 2.0}


def test_what_has_no_trace_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--use-pytorch-profiler"):
        read_traces(tmp_path)
    with pytest.raises(ConfigError, match="--no-record-memory-history"):
        check_profiler(settings("1f1b").with_values(record_memory_history=True).logging, "cpu")


SPANS = st.dictionaries(
    st.sampled_from(["ph", "name", "cat", "ts", "dur", "tid"]),
    st.one_of(
        st.sampled_from(["X", "M", "cpu_op", "kernel", "user_annotation", "F of stage 0", "x"]),
        st.integers(0, 100),
        st.none(),
    ),
)

NUMBERS = st.integers(0, 2) | st.sampled_from([-1, 1e300, 2**63])
TIMED = st.fixed_dictionaries(
    {"ph": st.just("X"), "ts": NUMBERS, "dur": NUMBERS},
    optional={
        "name": st.sampled_from(["x", "pp: send, " + "9" * 5000 + " B sent"]),
        "cat": st.sampled_from(["kernel", "cpu_op"]),
    },
)


@given(st.lists(SPANS | TIMED, max_size=6))
def test_any_events_are_read(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    (RunFolder(folder).profile).mkdir()
    (RunFolder(folder).profile / "rank-3.json").write_text(json.dumps({"traceEvents": events}))
    (trace,) = read_traces(folder)
    assert trace.seconds >= 0 and list(shown(trace, 3))
    assert len(merged([trace])["traceEvents"]) >= 1


def test_traces_of_an_earlier_start_are_forgotten(tmp_path: Path) -> None:
    """It had more ranks, or was killed before all of them had written theirs."""
    for rank in range(4):
        (tmp_path / f"rank-{rank}.json").write_text("{}")
    _forget(tmp_path, 2, (0, 2))
    assert {path.name for path in tmp_path.iterdir()} == {f"rank-{n}.json" for n in (0, 1, 3)}
    _forget(tmp_path, 0, (0, 2))
    assert not [*tmp_path.iterdir()]


def test_a_trace_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert not _is_whole(path)
    for text, whole in (('{"a": [{}]}\n', True), ("{}", True), ('{"a"', False)):
        path.write_text(text)
        assert _is_whole(path) == whole
    path.write_text("")
    assert not _is_whole(path)


@pytest.mark.parametrize("profiles", [True, False])
def test_a_rank_without_a_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profiles: bool
) -> None:
    """Unless the latest start recorded nothing, and its settings are not those of the traces."""
    values = {"use_pytorch_profiler": profiles, "profile_ranks": (0, 1)}
    (tmp_path / "config.toml").write_text(to_toml(settings("1f1b").with_values(**values)))
    (RunFolder(tmp_path).profile).mkdir()
    (RunFolder(tmp_path).profile / "rank-1.json").write_text('{"traceEvents": []}')
    assert main(["profile", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert ("no trace of rank 0, which profile_ranks names" in said) == profiles
