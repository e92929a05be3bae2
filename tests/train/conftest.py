from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, so that nothing waits for the tokenisation of a large one."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(2000)]
    for part in range(4):
        text = "\n".join(lines[part::4])
        (folder / f"part-{part}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two ranks, which is only read and copied."""
    from tests.train.test_run import TWO, train

    run = tmp_path_factory.mktemp("runs") / "finished"
    done = train(cache, run, *TWO)
    assert done.returncode == 0, done.stderr
    return run
