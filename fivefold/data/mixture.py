"""Parses the data paths of a run, with weights or names."""

import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from shlex import quote

from fivefold.config.data import MOCK, DataConfig
from fivefold.data.indexed import is_indexed
from fivefold.data.paths import BUILTIN, resolve
from fivefold.errors import Mistakes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Source:
    """One data path.

    Attributes:
        path: the path as it was given.
        weight: its weight in the blend; None: its number of samples.
        flag: what stands before it on a command line.
    """

    path: str
    weight: Fraction | None = None
    flag: str = "--data-path "

    @property
    def files(self) -> list[Path]:
        """Its files, sorted; DataError where there are none."""
        return resolve(self.path, self.flag)

    @property
    def indexed_prefix(self) -> str | None:
        """The prefix of a .bin/.idx pair, if the path names one; else None."""
        if self.path in (BUILTIN, MOCK):  # whatever files have these names
            return None
        prefix = os.path.expanduser(self.path)
        if prefix.endswith((".bin", ".idx")):
            prefix = prefix[:-4]
        return prefix if is_indexed(prefix) else None


def parse_data_path(data_path: Sequence[str]) -> list[Source]:
    """Parse paths, or alternating weights and paths as in Megatron-LM: "0.3", "a", "0.7", "b".

    Raises:
        ConfigError: a weight or a path is missing, or a weight is not positive; all mistakes at
            once.
    """
    words = list(data_path)
    there = {word for word in words if os.path.lexists(word) or is_indexed(word)}
    if len(words) == 1 and not there and _weight(words[0].split(" ")[0]) is not None:
        words = words[0].split()
    mistakes = Mistakes()
    if not words:
        mistakes.add("data_path is empty", works=("--data-path builtin",))
    weights = [_weight(word) for word in words]
    if all(weight is None for weight in weights):
        mistakes.raise_if_any()
        return [Source(word) for word in words]
    paths = [word for word, weight in zip(words, weights, strict=True) if weight is None]
    pairs = zip(words[::2], words[1::2], weights[::2], strict=False)
    kept = [each for *pair, weight in pairs if weight is not None and weight > 0 for each in pair]
    if len(words) % 2:
        mistakes.add(
            f"data_path has {len(words)} entries; weights and paths by turns make an even number",
            works=[f"--data-path {' '.join(map(quote, paths))}"] if paths else [],
        )
    for place, (word, weight) in enumerate(zip(words, weights, strict=True), start=1):
        if place % 2 == 0 and weight is not None:
            mistakes.add(f"entry {place} of data_path is {word}, where a path should be")
        elif place % 2 and weight is None:
            mistakes.add(f"entry {place} of data_path is {word!r}, where a weight should be")
        elif weight is not None and weight <= 0:
            mistakes.add(
                f"weight {word} in data_path is not positive",
                works=[f"--data-path {' '.join(map(quote, kept))}"] if kept else [],
            )
    if mistakes.found and (called := sorted(there - {*paths})):
        typed = [f"./{word}" if word in called else word for word in words]
        mistakes.add(
            f"a number in data_path is a weight; files or folders are called {', '.join(called)}",
            works=[f"--data-path {' '.join(map(quote, typed))}"],
        )
    mistakes.raise_if_any()
    return [Source(path, weight) for path, weight in zip(words[1::2], weights[::2], strict=True)]


def parse_named_paths(words: Sequence[str]) -> dict[str, Source]:
    """Parse NAME=PATH of validation sets, in their order.

    Raises:
        ConfigError: an entry has no name or no path, or two have the same; all mistakes at once.
    """
    mistakes = Mistakes()
    found: dict[str, Source] = {}
    for place, word in enumerate(words, start=1):
        name, equals, path = word.partition("=")
        entry = f"entry {place} of valid_data_path, {word!r},"
        if not equals or "/" in name:
            made = re.sub(r"\W+", "-", Path(word).stem).strip("-_") or f"set{place}"
            why = "each validation set is NAME=PATH, and its loss is eval_loss_NAME"
            attempt = f"--valid-data-path {quote(f'{made}={word}')}"
            mistakes.add(f"{entry} has no name", why, attempt=attempt)
        elif not _NAME.fullmatch(name):
            mistakes.add(f"{entry} has a name that is not letters, digits, and _ . - after them")
        elif not path:
            mistakes.add(f"{entry} has no path after {name}=")
        elif path == MOCK:
            mistakes.add(f"{entry} names made-up tokens, which evaluate nothing")
        elif name in found:
            mistakes.add(
                f"two entries of valid_data_path are called {name}: {found[name].path} and {path}",
                "a set of several files is a folder, or a glob in quotes",
            )
        else:
            found[name] = Source(path, flag=f"--valid-data-path {name}=")
    mistakes.raise_if_any()
    return found


def _weight(word: str) -> Fraction | None:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def counted_from(folder: Path, data: DataConfig) -> DataConfig:
    """The data with relative paths taken from a folder, where the file exists there; others
    stay."""

    def meant(path: str) -> str:
        found = str(folder / os.path.expanduser(path))
        there = os.path.exists(found) or is_indexed(found) or glob.glob(found, recursive=True)
        return found if there and path not in (BUILTIN, MOCK) else path

    return with_paths(data, meant)


def with_paths(data: DataConfig, meant: Callable[[str], str]) -> DataConfig:
    """The data with each path replaced by `meant` of it."""
    sources = parse_data_path(data.data_path)
    weighted = [[str(each.weight)] if each.weight is not None else [] for each in sources]
    blend = [[*weight, meant(each.path)] for weight, each in zip(weighted, sources, strict=True)]
    named = parse_named_paths(data.valid_data_path).items()
    return replace(
        data,
        data_path=tuple(chain.from_iterable(blend)),
        valid_data_path=tuple(f"{name}={meant(each.path)}" for name, each in named),
    )


@dataclass(frozen=True)
class Group:
    """The files of one corpus: an indexed pair, or text files; none of mock."""

    name: str
    weight: Fraction | None
    prefix: str | None = None
    files: tuple[Path, ...] = ()


def grouped(sources: Sequence[Source]) -> list[Group]:
    """One group for each source; all text without weights forms one group at the first place.

    Raises:
        DataError: a path does not exist, or names no file that can be read.
    """
    groups: list[Group] = []
    loose = [source for source in sources if not source.indexed_prefix and source.weight is None]
    for source in sources:
        name = os.path.basename(source.path.rstrip("/"))
        if source.path == MOCK:
            groups.append(Group(MOCK, source.weight))
        elif prefix := source.indexed_prefix:
            groups.append(Group(name, source.weight, prefix=prefix))
        elif source.weight is not None:
            groups.append(Group(name, source.weight, files=tuple(source.files)))
        elif source is loose[0]:
            names = [os.path.basename(other.path.rstrip("/")) for other in loose]
            files = dict.fromkeys(file for other in loose for file in other.files)
            groups.append(Group(" + ".join(names), None, files=tuple(files)))
    return groups
