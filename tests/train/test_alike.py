"""Ranks of a launcher that were given other settings, text or folders than the first say so."""

import os
from copy import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import SECTION_SETTINGS
from fivefold.config.sources import read_config
from fivefold.errors import CheckpointError, ConfigError
from fivefold.train.corpora import open_data
from fivefold.train.folder.lock import claim
from fivefold.train.ranks import hosts
from fivefold.train.ranks.hosts import (
    OF_A_HOST,
    check_alike,
    check_seen,
    given_data,
    given_settings,
)
from tests import pool

HOSTS = ("a", "b", "b", "c")


def _refused(rank: int, size: int, given: list[dict[str, str]]) -> str:
    try:
        check_alike(given[rank], HOSTS[:size])
    except ConfigError as error:
        return str(error)
    return ""


def _told(given: list[dict[str, str]]) -> list[str]:
    said = pool.run(len(given), _refused, given)
    assert len(set(said)) == 1  # every rank says the same, so that it is printed once
    text: str = said[0]
    return text.splitlines()


def test_each_difference_is_told_with_the_ranks_that_have_it() -> None:
    same = {"lr": "1", "seed": "2", "torch": "2.13"}
    assert not _told([same, same, same, same])
    said = _told([same, same | {"lr": "3"}, same | {"lr": "3"}, same | {"other": "4"}])
    assert [line for line in said if "try:" not in line] == [
        "ranks 1, 2 on b were not given what rank 0 on a was",
        "  lr = 3, not 1",
        "rank 3 on c was not given what rank 0 on a was",
        "  other = 4, not None",
    ]
    many = {f"{n}": f"{n}" for n in range(30)}
    assert "  and 25 more" in _told([same, many])


def test_no_setting_may_differ_but_places_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_sources", lambda: "")  # else hundreds of times all are read
    config = read_config("debug")
    given = given_settings(config)
    for section, settings in SECTION_SETTINGS.items():
        for setting in settings:
            other, values = copy(config), copy(getattr(config, section))
            object.__setattr__(values, setting.name, "another value")  # whatever its type
            object.__setattr__(other, section, values)
            assert (given_settings(other) != given) == (setting.name not in OF_A_HOST), setting.name


def test_other_text_or_another_tokenizer_is_other_data(cache: Path, tmp_path: Path) -> None:
    def given(text: str) -> dict[str, str]:
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / "text.txt").write_text(text * 4000)
        where = {"data_path": (f"{tmp_path}/corpus",), "data_cache_path": f"{tmp_path}/{len(text)}"}
        return given_data(open_data(read_config("debug", **where), str))

    one = given("one two ")
    assert given("one two ") == one
    assert given("one three ") != one


def _sees(rank: int, size: int, folders: list[Path]) -> str:
    hosts.SEEN_SECONDS = 0.6
    lock = claim(folders[0]) if rank == 0 else None
    try:
        dist.barrier()
        check_seen(folders[rank], HOSTS[:size])
    except ConfigError as error:
        return str(error)
    finally:
        dist.barrier()
        if lock is not None:
            lock.release()
    return ""


def test_a_run_folder_that_a_host_does_not_see_is_refused(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    assert pool.run(2, _sees, [own, own]) == ["", ""]
    (lock := claim(other)).begin()  # of another run there
    (other / "run.lock").write_text((other / "run.lock").read_text() + " ")
    said = pool.run(2, _sees, [own, other])
    lock.release()
    assert said[0].startswith(f"the run folder {own} of rank 0 on a is not there on b\n")
    assert said[1].splitlines()[1:] == said[0].splitlines()[1:]
    assert not own.exists()


def _saves(rank: int, size: int, folder: Path) -> str:
    place = folder / f"{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)  # where a relative path leads elsewhere on each rank
    try:
        Checkpointer("run").save(1, {f"weight {rank}": torch.ones(3)}, {})
    except CheckpointError as error:
        return str(error)
    finally:
        os.chdir("/")
    return ""


def test_a_checkpoint_without_the_files_of_a_rank_is_not_complete(tmp_path: Path) -> None:
    said = pool.run(2, _saves, tmp_path)
    assert said[0] == said[1]
    assert "1 of 4 files are not in run/step-00000001.tmp, such as __1_0.distcp" in said[0]
    assert not list(tmp_path.glob("0/run/step*"))
