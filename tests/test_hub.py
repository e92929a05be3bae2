"""What is named as on the Hugging Face hub is fetched, once, or refused in one message."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from safetensors.torch import load_file
from torch import equal

from fivefold.cli.main import main
from fivefold.config.sources import read_config
from fivefold.errors import ConfigError
from fivefold.hub import CONFIG_ALONE, WEIGHTS, data_named, fetched_model, in_place, model_named
from tests.hub_server import COMMIT, Hub, serving

AWAY = "http://127.0.0.1:9"
WORDS = [{"text": f"{'ab' * n} is {n} times ab. " * 20} for n in range(1, 40)]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's folders: org/tiny, of a run that was converted, and datasets/org/words."""
    folder = tmp_path_factory.mktemp("hub")
    texts = folder / "datasets" / "org" / "words"
    (texts / "part").mkdir(parents=True)
    (texts / "README.md").write_text("no text to learn from")
    (texts / "other.jsonl").write_text('{"body": "has no text"}\n')
    (texts / "part" / "0.jsonl").write_text("\n".join(map(json.dumps, WORDS)))
    run = ["--data-path", str(texts / "part"), "--train-iters", "1", "--lr-warmup-iters", "0"]
    run += ["--data-cache-path", str(folder / "cache"), "--device", "cpu"]
    assert main(["train", "debug", *run, "--save", str(folder / "run")]) == 0
    assert main(["convert", str(folder / "run"), str(folder / "org" / "tiny")]) == 0
    (folder / "org" / "tiny" / "original").mkdir()
    for name in ("consolidated.safetensors", "original/model.safetensors"):
        (folder / "org" / "tiny" / name).write_bytes(b"the same in another layout")
    return folder


@pytest.fixture
def hub(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    with serving(repositories) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        files = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + files)
        yield hub


def test_a_run_starts_from_what_is_on_the_hub(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "debug", "--model", "org/tiny", "--load", "org/tiny", "--device", "cpu"]
    words += ["--tokenizer-model", "hf://org/tiny@main", "--lr-warmup-iters", "0"]
    words += ["--data-path", "hf://datasets/org/words/part", "--data-cache-path", "cache"]
    assert main([*words, "--train-iters", "1", "--save", "run"]) == 0
    assert f"org/tiny is https://huggingface.co/org/tiny at {COMMIT[:8]}" in capsys.readouterr().err
    config = read_config("run/config.toml")
    assert Path(str(config.checkpoint.load), "model.safetensors").is_file()
    assert [f.name for f in Path(config.data.data_path[0]).iterdir()] == ["0.jsonl"]
    asked = hub.asked.copy()
    assert not [path for path in asked if "original" in path or "consolidated" in path]
    assert main([*words, "--train-iters", "2", "--save", "again"]) == 0
    assert hub.asked == asked  # what was fetched is there


def test_weights_come_to_the_byte_and_once_for_many(hub: Hub, repositories: Path) -> None:
    named = model_named("org/tiny")
    assert named is not None
    with ThreadPoolExecutor(4) as several:
        found = set(several.map(lambda _: fetched_model(named, WEIGHTS, lambda _: None), range(4)))
    assert len(found) == 1
    (path,) = (path for path in hub.asked if path.endswith("/model.safetensors"))
    assert hub.asked[path] <= 2  # its head, and it
    assert main(["convert", "org/tiny", "run"]) == 0
    assert main(["convert", "run", "back", "--dtype", "fp32"]) == 0
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (Path("back"), repositories / "org/tiny")
    )
    assert ours.keys() == theirs.keys()
    assert all(equal(ours[name], theirs[name]) for name in theirs)


def test_a_fetch_that_ends_early_is_not_taken_for_whole(hub: Hub) -> None:
    hub.lost = {"model.safetensors"}
    with pytest.raises(ConfigError):
        in_place("org/tiny", WEIGHTS, lambda _: None)
    hub.lost = set()
    assert (in_place("org/tiny", WEIGHTS, lambda _: None) / "model.safetensors").is_file()


def test_what_others_fetched_is_taken_where_there_is_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for whole, if it was a part."""
    in_place("org/tiny", CONFIG_ALONE, lambda _: None)
    with monkeypatch.context() as away:
        away.setattr(constants, "ENDPOINT", AWAY)
        with pytest.raises(ConfigError, match="hf download org/tiny"):
            in_place("org/tiny", WEIGHTS, lambda _: None)
    fetched = snapshot_download("org/tiny")
    asked = hub.asked.copy()
    with monkeypatch.context() as away:
        away.setattr(constants, "ENDPOINT", AWAY)
        assert in_place("org/tiny", WEIGHTS, lambda _: None) == Path(fetched)
        with pytest.raises(ConfigError, match="cannot be reached"):
            in_place("org/tiny@v2", WEIGHTS, lambda _: None)
    assert hub.asked == asked


def _gated(hub: Hub) -> None:
    hub.gated = {"org/tiny"}


def _away(hub: Hub) -> None:
    constants.ENDPOINT = AWAY  # which the fixture takes back


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        ("plan org/tiny --gpus 8", _gated, "licence"),
        ("plan org/tiny --gpus 8", _away, "hf download org/tiny"),
        ("plan org/none --gpus 8", None, "there is no org/none"),
        ("plan qwen/qwen3-8b --gpus 8", None, "did you mean 'Qwen/Qwen3-8B'?"),
        ("train debug --load org/none", None, "there is no org/none"),
        ("train debug --load org/tiny@v9", None, "no revision v9"),
        ("train debug --tokenizer-model org/none", None, "there is no org/none"),
        ("train debug --load org/tiny --tp 3 --nproc 3", _away, "works: --tp"),
        ("convert org/none out", None, "there is no org/none"),
        ("data debug --data-path hf://words", None, "names no data set"),
        ("data debug --data-path hf://datasets/org/none", None, "there is no org/none"),
        ("data debug --data-path hf://datasets/org/words/q", None, "org/words has no"),
        ("train Qwen/Qwen3-8B", None, "--model Qwen/Qwen3-8B"),
        ("train --load org/tiny", None, "works: --model org/tiny"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_message(
    words: str,
    given: Callable[[Hub], None] | None,
    says: str,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if given is not None:
        given(hub)
    assert main([*words.split(), *["--data-cache-path", "cache"] * ("debug" in words)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("org/tiny", "org/tiny"),
        ("hf://org/tiny@v1.0", "org/tiny"),
        ("hf://here/tiny", "here/tiny"),
        ("here/tiny", None),
        ("./org/tiny", None),
        ("/org/tiny", None),
        ("~/tiny", None),
        ("tiny", None),
        ("a/b/c", None),
    ],
)
def test_a_path_is_not_a_name(
    name: str, repo: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    named = model_named(name)
    assert (None if named is None else named.repo) == repo


def test_what_is_named_within_a_data_set() -> None:
    named = data_named("hf://datasets/org/words@v2/sample/10BT/*.parquet")
    assert named is not None
    assert (named.repo, named.revision, named.path) == ("org/words", "v2", "sample/10BT/*.parquet")
    assert data_named("org/words") is None
