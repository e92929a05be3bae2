"""Files of a run folder that were emptied, cut, flipped or rewritten: an answer, or one message.

Each reader sees a hundred mutations of its file, as bytes and as values, and a thousand under
`-m exhaustive`; FIVEFOLD_MUTATIONS says how many.
"""

import contextlib
import json
import os
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.audit.record import RankRecord, expected_record, write_record
from fivefold.check import check
from fivefold.cli.audit import run as audit
from fivefold.cli.watch import view
from fivefold.config.sources import read_config, to_toml
from fivefold.errors import FivefoldError
from fivefold.files import read_json
from fivefold.learn.runs import observed
from fivefold.report.history import read_history
from fivefold.report.page import page
from fivefold.report.settings import run_config
from fivefold.train.folder.lock import FILE, Owner
from fivefold.train.folder.metrics_file import MetricsFile
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.metrics import LayerRouting
from tests.train.test_metrics import step_metrics

TIMES = int(os.environ.get("FIVEFOLD_MUTATIONS", "0"))
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e300, 1e-320),
    *("", "3", "1e-5", "\0", "\ud800", "é" * 99, [], [1], ["a"], {}, {"step": 1}, [[[]]], {"": {}}),
)
TOKENS = (b"", b"null", b"1e999", b"-1", b"NaN", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\xff")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes gone, changed or added."""
    start = chance.randrange(len(data) + 1)
    stop = min(len(data), start + chance.choice((0, 1, 1, 2, 8, 100, 10**6)))
    new = chance.choice((b"", bytes([chance.randrange(256)]), chance.choice(TOKENS), data[:50]))
    return data[:start] + new + data[stop:]


def changed(value: Any, chance: random.Random) -> Any:
    """One value somewhere in a JSON value replaced, removed or renamed."""
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        copy = value.copy()
        key = chance.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if chance.random() < 0.15:
            del copy[key]
        elif isinstance(copy, dict) and chance.random() < 0.1:
            copy[f"{key}x"] = copy.pop(key)
        else:
            copy[key] = changed(copy[key], chance)
        return copy
    return chance.choice(VALUES)


def as_toml(text: bytes, chance: random.Random) -> bytes:
    """A line of TOML with another value."""
    lines = text.decode().splitlines()
    at = chance.choice([n for n, line in enumerate(lines) if " = " in line])
    others = [line.split(" = ")[1] for line in lines if " = " in line]
    values = ('""', "-1", "0", "1e300", "nan", "inf", "9" * 30, "true", "[]", "{}", '"a"', "1e999")
    new = chance.choice((*values, *others, "[" * 2000, "9" * 5000))
    lines[at] = f"{lines[at].split(' = ')[0]} = {new}"
    return "\n".join(lines).encode()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of two ranks leaves, but for its checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    layout = check(read_config("debug", data_parallel_sharding_strategy="optim"), 2)
    RunFolder(folder).open(to_toml(layout.config))
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, 5):
        routing = (LayerRouting.of(0, (5.0, 3.0, 1, 0.1, 0, 0)),)
        tokens = layout.config.training.step_tokens
        metrics.record(step_metrics(step, world_size=2, routing=routing, tokens=tokens))
    metrics.close()
    for rank in range(2):
        empty = RankRecord(rank, 2, {}, 0.0, 0.0, 0.0, {}, 0.0)
        write_record(folder / "audit", expected_record(layout, empty))
    owner = {"host": "a", "machine": "b", "pid": 3, "since": "c", "begun": True}
    (folder / FILE).write_text(json.dumps(owner))
    return folder


def resumed(run: Path) -> None:
    MetricsFile(run / "metrics.jsonl", after_step=2).close()


def audited(run: Path) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        audit([str(run)])


def shown(run: Path) -> None:
    history = read_history(run)
    page([history])
    view(history, 80)


READERS: dict[str, tuple[str, Callable[[Path], object], int]] = {
    "start": ("environment.json", lambda run: RunFolder(run).starts(), 150),
    "report starts": ("environment.json", shown, 40),
    "resume": ("metrics.jsonl", resumed, 100),
    "report metrics": ("metrics.jsonl", shown, 50),
    "learn": ("metrics.jsonl", observed, 80),
    "audit metrics": ("metrics.jsonl", audited, 40),
    "audit records": ("audit/rank-1.json", audited, 70),
    "settings": ("config.toml", run_config, 80),
    "audit settings": ("config.toml", audited, 50),
    "owner": (FILE, lambda run: read_json(run / FILE, Owner), 150),
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [1, pytest.param(15, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", READERS)
def test_no_mutation_of_a_run_folders_file_ends_in_a_traceback(
    run: Path, kind: str, more: int
) -> None:
    name, read, times = READERS[kind]
    chance, path = random.Random(0), run / name
    whole = path.read_bytes()
    accepted = refused = 0
    try:
        for _ in range(TIMES or more * times):
            if chance.random() < 0.5:
                data = mutated(whole, chance)
            elif name.endswith(".toml"):
                data = as_toml(whole, chance)
            elif name.endswith(".jsonl"):
                lines = whole.splitlines()
                at = chance.randrange(len(lines))
                lines[at] = json.dumps(changed(json.loads(lines[at]), chance)).encode()
                data = b"\n".join(lines) + b"\n"
            else:
                data = json.dumps(changed(json.loads(whole), chance)).encode()
            path.write_bytes(data)
            try:
                read(run)
                accepted += 1
            except FivefoldError as error:
                assert str(error).strip()
                refused += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {data[:2000]!r}") from error
    finally:
        path.write_bytes(whole)
    assert accepted and (refused or kind == "resume")


def test_what_cannot_be_read_of_metrics_is_counted_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n[1]\n{"step": "2"}\n{"step": 2}\n{"step": 9}\n{"ste')
    file = MetricsFile(path, after_step=2)
    file.close()
    assert file.removed == 3
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_settings_that_no_run_had_are_named(run: Path, tmp_path: Path) -> None:
    text = (run / "config.toml").read_text()
    assert tomllib.loads(text)["training"]["seq_length"] == 64
    (tmp_path / "config.toml").write_text(text.replace("seq_length = 64", "seq_length = -4"))
    with pytest.raises(FivefoldError, match=r"does not hold(?s:.*)must be at least 1, not -4"):
        run_config(tmp_path)
