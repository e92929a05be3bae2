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
