"""The output of commands, where it follows from their words."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from fivefold.shell.sums import ShellSum
from fivefold.shell.unknown import begins_unknown, is_unknown, unknown_names


class Printed:
    """What the statements in $() print.

    Attributes:
        known: whether it follows from their words.
        given: what the command before a pipe printed, for the one after it; None: no pipe.
    """

    def __init__(self) -> None:
        self._before, self._now = "", ""
        self.known = True
        self.given: str | None = None

    def begin(self, *, piped: bool) -> None:
        """Begin a statement, which may be given what the last one printed."""
        self._before += "" if piped else self._now
        self.given, self._now = self._now if piped else None, ""

    def add(self, text: str | None) -> bool:
        """What a command prints, None if nobody here knows; returns whether it is known."""
        self.known = self.known and text is not None
        self._now += text or ""
        return text is not None

    @property
    def text(self) -> str:
        """All that is known of it."""
        return self._before + self._now


def answer(name: str, words: Sequence[str], given: str | None, folder: str) -> str | None:
    """What a command prints; None: nobody here knows.

    Args:
        name: the command.
        words: what it is called with.
        given: what it reads; None: nothing that is known.
        folder: the working directory.
    """
    if given is not None:
        reads = _READERS.get(name)
        output = None if reads is None or list(unknown_names(given)) else reads(words, given)
    elif name in ("pwd", "realpath", "readlink"):
        output = _place(name, words, folder)
    else:
        output = _PRINTED[name](words) if name in _PRINTED else None
    return output


def within(folder: str, path: str) -> str:
    """A path as it is from the root, if the working directory is `folder`; of a path that is not
    wholly known nothing is shortened."""
    whole = path if path.startswith("/") or begins_unknown(path) else f"{folder}/{path}"
    return whole if list(unknown_names(whole)) else os.path.normpath(whole)


def _place(name: str, words: Sequence[str], folder: str) -> str | None:
    """What tells where a file is, without links, which may be read here."""
    paths = [word for word in words if not word.startswith("-")]
    if name == "pwd" or (name == "readlink" and "-f" not in words) or len(paths) != 1:
        return f"{folder}\n" if name == "pwd" else None
    path = within(folder, paths[0])
    return f"{path if list(unknown_names(path)) else os.path.realpath(path)}\n"


def _folder_of(words: Sequence[str]) -> str | None:
    return f"{PurePath(words[-1]).parent}\n" if words and not is_unknown(words[-1]) else None


def _name_of(words: Sequence[str]) -> str | None:
    words = [word for word in words if word != "--"]
    if len(words) not in (1, 2) or words[0].startswith("-"):
        return None
    name, ending = PurePath(words[0]).name, "".join(words[1:])
    return f"{name if name == ending else name.removesuffix(ending)}\n"


def _sum(words: Sequence[str]) -> str | None:
    text = " ".join(words)
    plain = re.fullmatch(r"[-+*/%() \d]+", text)
    return f"{ShellSum(text, lambda _: '', lambda *_: None).value()}\n" if plain else None


def _echo(words: Sequence[str]) -> str:
    output = " ".join(word for word in words if word not in ("-n", "-e"))
    return output if "-n" in words else f"{output}\n"


def formatted(words: Sequence[str]) -> str | None:
    """What `printf` prints: a format with %s and %d, again and again while there are words."""
    if not words or re.search(r"%(?![sd%])|\\(?![nt\\])", words[0]) or words[0].startswith("-"):
        return None
    pieces = re.findall(r"%[sd%]|\\.|[^%\\]+", words[0])
    plain = {"%%": "%", "\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    output, left = "", list(words[1:])
    while True:
        before = len(left)
        for piece in pieces:
            if piece in ("%s", "%d"):
                output += left.pop(0) if left else "" if piece == "%s" else "0"
            else:
                output += plain.get(piece, piece)
        if not left or len(left) == before:
            return output


def _numbers(words: Sequence[str]) -> str | None:
    """What `seq` prints: whole numbers from a first (1) to a last, by a step (1)."""
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d{1,4}", word) for word in words):
        return None
    first, last = int(words[0]) if len(words) > 1 else 1, int(words[-1])
    step = int(words[1]) if len(words) == 3 else 1
    every = range(first, last + (1 if step > 0 else -1), step) if step else ()
    return "".join(f"{number}\n" for number in every)


def _same(words: Sequence[str], given: str) -> str | None:
    return None if words else given


def _computed(words: Sequence[str], given: str) -> str | None:
    """What `bc` prints of whole numbers."""
    lines = given.strip().split("\n")
    return None if words or len(lines) > 1 or "^" in given else _sum([given.strip()])


def _replaced(words: Sequence[str], given: str) -> str | None:
    """What `tr` prints where it replaces or deletes single characters."""
    plain = [word.replace("\\n", "\n").replace("\\t", "\t") for word in words]
    if len(plain) != 2 or any("\\" in word or "[" in word or "-" in word[1:] for word in plain):
        return None
    old, new = plain
    if old == "-d":
        return given.translate(dict.fromkeys(map(ord, new)))
    if not old or not new:
        return None
    return given.translate({ord(each): new[min(n, len(new) - 1)] for n, each in enumerate(old)})


def _counted(words: Sequence[str], given: str) -> str | None:
    counts = {"-l": given.count("\n"), "-w": len(given.split())}
    return f"{counts[words[0]]}\n" if len(words) == 1 and words[0] in counts else None


_PRINTED: Mapping[str, Callable[[Sequence[str]], str | None]] = MappingProxyType(
    {
        "echo": _echo,
        "dirname": _folder_of,
        "basename": _name_of,
        "expr": _sum,
        "printf": formatted,
        "seq": _numbers,
    }
)
_READERS: Mapping[str, Callable[[Sequence[str], str], str | None]] = MappingProxyType(
    {"bc": _computed, "cat": _same, "tr": _replaced, "wc": _counted}
)
