"""Commands that read a run which goes on meanwhile, and removes checkpoints as it saves others."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main
from tests.programs import Program, run

READERS = {
    "sample": "sample {run} x --max-tokens 1",
    "sample by ranks": "sample {run} x --max-tokens 1 --tp 2",
    "eval": "eval {run} --eval-iters 1",
    "eval by ranks": "eval {run} --eval-iters 1 --nproc 2",
    "convert": "convert {run} {run}/hub",
    "adapters": "convert {run} {run}/hub --adapter",
}


def replaced(words: list[str], checkpoints: Path, number: int) -> None:
    """Run a command that finds step 2, which gives way to step 4 when it opens a file of it."""
    count = 0

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event != "open" or "/step-00000002/" not in str(arguments[0]):
            return
        count += 1
        if count == number and (checkpoints / "later").exists():
            (checkpoints / "later").rename(checkpoints / "step-00000004")
            (checkpoints / "latest").write_text("4\n")
            shutil.rmtree(checkpoints / "step-00000002")

    sys.argv = ["fivefold", *words]
    sys.addaudithook(see)
    sys.exit(main())


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, of which the second is put aside."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = f"--train-iters 4 --save-interval 2 --lora-rank 2 --data-path {cache}"
    flags += f" --data-cache-path {cache}/cache --num-layers 2 --global-batch-size 2"
    done = run(["train", "debug", "--save", str(folder), *flags.split()])
    assert done.returncode == 0, done.stderr
    (folder / "checkpoints" / "step-00000004").rename(folder / "checkpoints" / "later")
    (folder / "checkpoints" / "latest").write_text("2\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "number"),
    [  # the first file that they open, or one of the last; one and the other by ranks
        case
        if case[1] == (1, 6, 6, 1, 1, 6)[place]
        else pytest.param(*case, marks=pytest.mark.exhaustive)
        for place, reader in enumerate(READERS)
        for case in ((reader, 1), (reader, 3), (reader, 6))
    ],
)
def test_a_checkpoint_that_gives_way_to_a_later_one_is_not_missed(
    reader: str, number: int, trained: Path, tmp_path: Path
) -> None:
    for asked in ("", " --step 2")[: 1 + (number == 3)]:
        at = tmp_path / f"run{asked}"
        shutil.copytree(trained, at)
        words = [word.format(run=at) for word in f"{READERS[reader]}{asked}".split()]
        process = Program(replaced, words, at / "checkpoints", number)
        _, errors = process.communicate(60)
        gone = not (at / "checkpoints" / "later").exists()
        assert (process.returncode == 0) == (not gone or not asked), errors
        assert "Traceback" not in errors and "damaged" not in errors
        if gone and asked:
            assert "there is no checkpoint of step 2" in errors and "--step 4" in errors
