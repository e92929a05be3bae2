"""The tokenizer in a run folder, which must be the one that the run was trained with."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote

from fivefold.config.sources import read_config
from fivefold.data.prepare import DEFAULT_CACHE
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError, FivefoldError, Mistake
from fivefold.files import at_home, read_text
from fivefold.train.folder.run_folder import TOKENIZER, RunFolder
from fivefold.train.folder.saved_state import SavedState


def run_tokenizer(run: Path, state: SavedState) -> Tokenizer:
    """The tokenizer in a run folder.

    Args:
        run: run folder.
        state: state of a checkpoint of the run, which says what it was trained with.

    Raises:
        DataError: there is none, which weights of others may have come without; it is damaged, or
            another one, by which the model would be given other tokens than those it knows.
    """
    file, expected = RunFolder(run).tokenizer, state.loader["fingerprint"].get("tokenizer")
    found = _digest(file) if file.is_file() else None
    if found is not None and expected in (None, found):  # none: weights of others
        return Tokenizer.load(file)
    what, why = f"{run} has no {TOKENIZER}, which turns text into tokens", list[str]()
    if found is not None:
        what = f"{file} is not the tokenizer that step {state.step} was trained with"
        why.append(f"expected SHA-256 {str(expected)[:16]}, found {found[:16] or 'no text'}")
    attempt = f"the model's own, copied to {file}"
    same = next((path for path in _others(run) if _digest(path) == expected), None)
    if same is not None:
        attempt = f"cp {quote(str(same))} {quote(str(file))}"
    raise DataError(Mistake(what, tuple(why), attempt=attempt))


def known_tokenizer(folders: Iterable[Path], state: SavedState) -> Path | None:
    """The first of the tokenizers in these folders with which a checkpoint was trained, if any."""
    expected = state.loader["fingerprint"].get("tokenizer")
    files = (file for folder in folders if (file := folder / TOKENIZER).is_file())
    return next((file for file in files if expected in (None, _digest(file))), None)


def _digest(file: Path) -> str:
    """As `Tokenizer.digest`; empty if the file cannot be read as text."""
    with suppress(DataError):
        return hashlib.sha256(read_text(file, DataError).encode()).hexdigest()
    return ""


def _others(run: Path) -> Iterator[Path]:
    """Other places that may hold the run's tokenizer: the path in its settings, or the cache."""
    with suppress(FivefoldError):
        data = read_config(RunFolder(run).config_file).data
        if data.tokenizer_model is not None:
            named = RunFolder(run).named(data.tokenizer_model)
            yield named / TOKENIZER if named.is_dir() else named
        yield from at_home(data.data_cache_path or DEFAULT_CACHE).glob("tokenizer-*.json")
