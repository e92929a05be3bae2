"""What a recipe reads and does not ship with is named, with commands that get it or do without."""

import re
import shlex
from dataclasses import dataclass

import pytest

from fivefold.config.settings import argument
from fivefold.config.sources import load, read_config, recipe_names
from fivefold.data.indexed import write_indexed
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError
from fivefold.recipes import FETCH
from fivefold.train.corpora import check_corpora, open_data


@dataclass(frozen=True)
class Options:
    """Of a verb with a recipe."""

    recipe: str | None = argument("recipe", None)


def check(command):
    """What `fivefold train` and `fivefold data` look at before anything starts."""
    check_corpora(load(shlex.split(command), Options)[1])


def test_each_thing_that_a_recipe_reads_can_be_fetched():
    named = set()
    for name in recipe_names():
        data = read_config(name).data
        named |= {path for path in (*data.data_path, data.tokenizer_model) if path}
    assert named - {"builtin"} == set(FETCH)


@pytest.mark.parametrize("path", FETCH)
def test_a_command_fetches_to_where_the_recipe_looks(path):
    tool, verb, _repository, *words = shlex.split(FETCH[path])
    assert (tool, verb, words[-2]) == ("hf", "download", "--local-dir")
    if path.endswith(".json"):
        assert f"{words[-1]}/{words[0]}" == path
    else:
        assert words[-1] == path and words[:2] == ["--repo-type", "dataset"]


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "llama3-405b", "qwen3-8b"])
def test_all_that_is_missing_is_told_at_once_and_what_is_offered_works(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = read_config(name).data
    with pytest.raises(DataError) as error:
        check(name)
    for path in (*data.data_path, data.tokenizer_model):
        assert FETCH[path] in str(error.value)
    assert f"looked for: {tmp_path / data.data_path[0]}" in str(error.value)
    attempts = str(error.value).rpartition("\n  try:   ")[2].split(" | ")
    assert len(attempts) == 2
    for attempt in attempts:
        check(f"{name} {attempt}")


def test_every_validation_set_that_is_missing_is_told(tmp_path):
    (tmp_path / "b.txt").write_text("text")
    sets = f"a={tmp_path}/a.txt b={tmp_path}/b.txt c={tmp_path}/c"
    with pytest.raises(DataError) as error:
        check(f"debug --valid-data-path {sets} --eval-interval 1")
    assert "validation set a: " in str(error.value) and "validation set c: " in str(error.value)
    assert "validation set b" not in str(error.value)
    for works in re.findall("works: (.*)", str(error.value)):
        check(f"debug {works} --eval-interval 1")


def test_a_part_that_is_there_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with write_indexed("mine", "u2") as writer:
        writer.add([1] * 50)
        writer.end_document()
    with pytest.raises(DataError, match="no tokenizer at data/gpt2") as error:
        check("gpt2 --data-path mine")
    assert "try:" not in str(error.value)  # tokens need the tokenizer that made them
    Tokenizer.train(["a text"], 300).save("data/gpt2/tokenizer.json")
    check("gpt2 --data-path mine")
    with pytest.raises(DataError, match="data/openwebtext") as error:
        check("gpt2")
    assert str(error.value).endswith("\n  try:   --data-path builtin | --data-path mock")


def test_a_path_of_ones_own_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(DataError, match=r"did you mean 'text\.txt'") as error:
        check("debug --data-path texd.txt --tokenizer-model t.json")
    assert "no tokenizer at t.json" in str(error.value)
    assert "try:" not in str(error.value)


def test_a_corpus_with_nothing_to_predict_is_refused(tmp_path):
    Tokenizer.train(["a text"], 300).save(tmp_path / "tokenizer.json")
    end = Tokenizer.load(tmp_path).eod_id
    with write_indexed(tmp_path / "ends", "u2") as writer:
        writer.add([end] * 1000)
        writer.end_document()
    words = f"debug --data-path {tmp_path}/ends --tokenizer-model {tmp_path}"
    with pytest.raises(
        DataError, match=r"train split of ends has nothing to predict(.|\n)*each th"
    ):
        open_data(load(shlex.split(words), Options)[1], print)
    open_data(load(shlex.split(f"{words} --no-eod-mask-loss"), Options)[1], print)
