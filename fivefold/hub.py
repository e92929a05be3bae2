"""Fetches models, adapters, tokenizers and data sets that are named as on the Hugging Face hub.

The library `huggingface_hub` does it, with its cache, token and variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE). What was fetched whole is noted there and not asked for again, so that
the ranks of a host fetch it once, and a run goes on with what it began with.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fivefold.errors import ConfigError, Mistake
from fivefold.files import write_atomic
from fivefold.once import once

Tell = Callable[[str], None]

SCHEME = "hf://"
# What stands beside weights: settings, tokenizers, and code, which is kept and never run.
BESIDE = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
WEIGHTS = (*BESIDE, "*.safetensors")
CONFIG_ALONE = ("config.json", "adapter_config.json")
# Copies of the weights in other layouts (Mistral's, Meta's), and other folders.
_COPIES = ("consolidated*", "*/*")
_NAME = r"[\w-][\w.-]*"
_MODEL = re.compile(rf"(?:hf://)?(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w./-]+))?/?")
_DATA = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w.-]+))?(?:/(?P<path>.*))?"
)


@dataclass(frozen=True)
class HubName:
    """A name on the hub.

    Attributes:
        repo: `ORG/NAME`.
        revision: branch, tag or commit; None: the main branch.
        kind: whether it is a model, as adapters and tokenizers are, too, or a data set.
        path: what is named within a data set: a file, a folder, a glob; empty: all of it.
    """

    repo: str
    revision: str | None
    kind: Literal["model", "dataset"] = "model"
    path: str = ""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")

    @property
    def page(self) -> str:
        """Its address."""
        return f"https://huggingface.co/{'datasets/' * (self.kind == 'dataset')}{self.repo}"


def model_named(name: str) -> HubName | None:
    """The model that `hf://ORG/NAME` names, or `ORG/NAME` if there is no local folder ORG; None: a
    path."""
    named = _MODEL.fullmatch(name)
    if named is None or (not name.startswith(SCHEME) and Path(name.partition("/")[0]).exists()):
        return None
    return HubName(named["repo"], named["revision"])


def data_named(spec: str) -> HubName | None:
    """The data set that `hf://datasets/ORG/NAME/PATH` names; None: it is a path.

    Raises:
        ConfigError: it begins so, and names nothing.
    """
    if not spec.startswith(SCHEME):
        return None
    if (named := _DATA.fullmatch(spec)) is None:
        what = f"{spec} names no data set of the Hugging Face hub"
        example = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet"
        raise ConfigError(Mistake(what, attempt=example))
    return HubName(named["repo"], named["revision"], "dataset", (named["path"] or "").strip("/"))


def in_place(name: str, files: Sequence[str], tell: Tell) -> Path:
    """A local folder: the path itself, or the folder that a model of the hub is fetched to; as
    `fetched_model`."""
    named = model_named(name)
    return Path(name) if named is None else fetched_model(named, files, tell)


def fetched_model(name: HubName, files: Sequence[str], tell: Tell) -> Path:
    """The folder in the library's cache that holds files of a model; fetched if it is not there.

    Args:
        name: the model.
        files: patterns of the names of files, which are at the top of the repository.
        tell: called before something is fetched.

    Raises:
        ConfigError: there is no such model, it may not be read, or the hub cannot be reached.
    """
    return _fetched(name, files, _COPIES, None, tell)


def fetched_data(name: HubName, suffixes: Sequence[str], cache: Path, tell: Tell) -> str:
    """The local path of files of a data set; fetched if they are not there.

    Args:
        name: the data set, and what of it.
        suffixes: ends of names of files with data, which are taken of folders.
        cache: folder to fetch it to.
        tell: called before something is fetched.

    Raises:
        ConfigError: as `fetched_model`; or there is no such file in it.
    """
    inner = f"{name.path}/" if name.path else ""
    files = [f"{inner}*{suffix}" for suffix in suffixes] + [name.path] * bool(name.path)
    place = cache / "hub" / f"{_flat(name)}-{_key(files)}"
    folder = _fetched(name, files, (), place, tell)
    return str(folder / name.path)


def _flat(name: HubName) -> str:
    return re.sub(r"[^\w.-]", "--", f"{name.kind}s--{name}")


def _key(files: Sequence[str]) -> str:
    return hashlib.sha256(repr(files).encode()).hexdigest()[:8]


def _fetched(
    name: HubName, files: Sequence[str], but: Sequence[str], place: Path | None, tell: Tell
) -> Path:
    """The folder with files of a repository: `place`, or None for one in the library's cache."""
    from huggingface_hub import constants  # takes a second

    notes = Path(constants.HF_HOME, "fivefold") if place is None else place.parent
    note = notes / f"{_flat(name)}-{_key(files)}.fetched"
    waiting = f"waiting for another process that fetches {name}"
    try:
        notes.mkdir(parents=True, exist_ok=True)
        if note.exists() and not Path(note.read_text()).is_dir():
            note.unlink()  # the cache was emptied
        with once(str(note), lambda: tell(waiting)) as missing:
            if not missing:
                return Path(note.read_text())
            tell(f"fetching {name} from the Hugging Face hub")
            folder, whole = _downloaded(name, files, but, place)
            if whole:
                write_atomic(note, str(folder))
            return folder
    except ConfigError:
        raise
    except Exception as error:  # what the HTTP library below raises depends on the release
        raise ConfigError(_fetch_mistake(name, error)) from error


def _downloaded(
    name: HubName, files: Sequence[str], but: Sequence[str], place: Path | None
) -> tuple[Path, bool]:
    """The folder with what was fetched, and whether it is known to be whole.

    If the hub is out of reach, it is whatever was fetched into the library's cache before.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    get = partial(
        snapshot_download,
        name.repo,
        repo_type=name.kind,
        revision=name.revision,
        allow_patterns=list(files),
        ignore_patterns=list(but),
        local_dir=place,
    )
    needed = WEIGHTS[-1] if WEIGHTS[-1] in files else "[!.]*"
    try:
        HfApi().repo_info(name.repo, repo_type=name.kind, revision=name.revision)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except Exception as away:
        if place is not None:
            raise errors.LocalEntryNotFoundError(str(away)) from away
        try:
            folder = Path(get(local_files_only=True))
        except errors.LocalEntryNotFoundError as error:
            raise error from away
        if not any(folder.glob(needed)):
            raise errors.LocalEntryNotFoundError(str(away)) from away
        return folder, False
    folder = Path(get())
    if not any(folder.glob(needed)):
        wanted = needed if needed in files else f"file like {', '.join(files)}"
        raise ConfigError(f"{name} has no {wanted}: {name.page}")
    return folder, True


def _fetch_mistake(name: HubName, error: Exception) -> Mistake:
    """The message for a failure of the library."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        what = f"{name} has a licence that has to be accepted on its page, {name.page}"
        return Mistake(what, attempt="accept it there, then: hf auth login")
    if isinstance(error, errors.RepositoryNotFoundError):
        what = f"there is no {name.repo}, neither a folder here nor a {name.kind} on the hub"
        return Mistake(what, attempt="for one that is private: hf auth login")
    if isinstance(error, errors.RevisionNotFoundError):
        return Mistake(f"{name.repo} has no revision {name.revision}: {name.page}")
    if isinstance(error, errors.LocalEntryNotFoundError):
        what = f"there is no folder {name.repo}, and the Hugging Face hub cannot be reached"
        fetch = f"hf download {name.repo}{' --repo-type dataset' * (name.kind == 'dataset')}"
        return Mistake(what, (_first(error),), attempt=f"where there is a network: {fetch}")
    return Mistake(f"{name} cannot be fetched from the Hugging Face hub: {_first(error)}")


def _first(error: Exception) -> str:
    cause = error.__cause__ or error
    return (str(cause) or type(cause).__name__).strip().splitlines()[0]
