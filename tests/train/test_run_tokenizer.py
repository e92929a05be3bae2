"""A run is read with the tokenizer that it was trained with, or not at all."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.cli.main import main

pytestmark = pytest.mark.slow


def other_ids(whole: bytes) -> bytes:
    """As good a tokenizer, by which two tokens have changed places."""
    settings = json.loads(whole)
    vocab = settings["model"]["vocab"]
    one, other = [*vocab][300:302]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    return json.dumps(settings).encode()


DAMAGES: tuple[Callable[[bytes], bytes | None], ...] = (
    *(other_ids, lambda whole: whole[:100], lambda whole: b"", lambda whole: b"\xff" + whole),
    lambda whole: None,
)


@pytest.mark.parametrize("verb", ["sample", "sample on two ranks", "eval", "convert"])
def test_another_tokenizer_than_the_runs_is_refused_and_the_advice_mends_it(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    run = tmp_path / "my run"
    shutil.copytree(finished, run)
    file = run / "tokenizer.json"
    whole = file.read_bytes()
    words = {
        "sample": ["sample", str(run), "def "],
        "sample on two ranks": ["sample", str(run), "def ", "--tp", "2"],
        "eval": ["eval", str(run)],
        "convert": ["convert", str(run), str(tmp_path / "hub")],
    }[verb]
    for damage in DAMAGES[: -1 if verb == "convert" else None]:  # weights may go without
        data = damage(whole)
        file.unlink() if data is None else file.write_bytes(data)
        assert main(words) == 2
        said = capfd.readouterr().err
        missing = f"{run} has no tokenizer.json, which turns text into tokens\n"
        other = f"{file} is not the tokenizer that step 6 was trained with\n"
        assert (missing if data is None else other) in said
        assert not (tmp_path / "hub").exists()
        subprocess.run(said.split("try: ")[-1], shell=True, check=True)
        assert file.read_bytes() == whole


@pytest.mark.parametrize("kind", ["run", "hub"])
def test_weights_are_given_the_tokens_that_they_know(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Whatever text they learn from next; a tokenizer of that text would give other tokens the same
    numbers. So does a run that goes on, though its own file is gone."""
    there, text, run = tmp_path / "there", tmp_path / "text", tmp_path / "run"
    if kind == "hub":
        assert main(["convert", str(finished), str(there)]) == 0
    else:
        shutil.copytree(finished, there)
    text.mkdir()
    (text / "a.txt").write_text("".join(f"{n} other words, {n * n}\n" for n in range(3000)))
    words = ["train", "debug", "--load", str(there), "--finetune", "--save", str(run)]
    words += ["--data-path", str(text), "--data-cache-path", str(tmp_path / "cache")]
    words += ["--seq-length", "32", "--global-batch-size", "1", "--lr-decay-iters", "9"]
    words += ["--num-layers", "2"]
    words = [word for word in words if kind == "run" or word != "--finetune"]
    assert main([*words, "--train-iters", "1"]) == 0
    told = f"text is tokenised by {there / 'tokenizer.json'}, which came with the weights"
    assert told in capfd.readouterr().out
    known = (finished / "tokenizer.json").read_bytes()
    assert (run / "tokenizer.json").read_bytes() == known
    (run / "tokenizer.json").unlink()
    assert main([*words, "--train-iters", "2"]) == 0
    assert (run / "tokenizer.json").read_bytes() == known
    if kind == "run":
        other = [*words, "--save", str(tmp_path / "other"), "--tokenizer-vocab-size", "400"]
        assert main([*other, "--train-iters", "1"]) == 0
        assert (tmp_path / "other" / "tokenizer.json").read_bytes() != known
