"""Expands the words of a script as a shell does before it calls a command."""

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import translate
from itertools import product
from typing import Protocol

from fivefold.errors import ConfigError
from fivefold.shell.scan import after_piece, end_of_word
from fivefold.shell.sums import ShellSum
from fivefold.shell.unknown import is_unknown, known_part, unknown, unknown_names

_PARAMETER = re.compile(r"(!?)(\w+|[@*#?$!-])(?:\[([^]]*)\])?(.*)", re.DOTALL)
_MOST = 1000  # numbers in braces
_PLAIN = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]")
_WHOLE = re.compile(r"\$(?:(@)|\{(@|\w+\[@\])\})")
_BRACES = re.compile(r"(?<!\$)\{([^{}\s'\"$]*(?:,[^{}\s'\"$]*)+|-?\d+\.\.-?\d+(?:\.\.-?\d+)?)\}")


class Values(Protocol):
    """The variables of a script."""

    def get(self, name: str, index: str | None = None) -> str:
        """A value; if it has none, a marker that says it is not known."""

    def several(self, name: str) -> list[str]:
        """The values of an array; of "@" and "*" the arguments."""

    def keys(self, name: str) -> list[str]:
        """The keys of an array."""

    def put(self, name: str, value: str, index: str | None = None) -> None:
        """Give a variable, or an entry of an array, another value."""


class Expander:
    """Expands words, with the values of variables.

    Args:
        values: the variables.
        printed: the output of a text in $(); None: nobody here knows it.
    """

    def __init__(self, values: Values, printed: Callable[[str], str | None]) -> None:
        self._values, self._printed = values, printed

    def fields(self, words: Sequence[str]) -> list[str]:
        """All words of a command."""
        return [field for word in words for one in _braced(word) for field in self._split(one)]

    def text(self, word: str) -> str:
        """One word as one text, as in an assignment: nothing is split."""
        return "".join(f"{piece} " if ends else piece for piece, _, ends in self._pieces(word))

    def entries(self, inner: str) -> list[tuple[str | None, str]]:
        """The entries in the parentheses of an array, with keys where they are given."""
        found: list[tuple[str | None, str]] = []
        for word in words_of(inner):
            if keyed := re.match(r"\[([^]]*)\]=", word):
                found.append((self.text(keyed[1]), self.text(word[keyed.end() :])))
            else:
                found += [(None, field) for field in self.fields([word])]
        return found

    def sum(self, text: str) -> str:
        """The value of a sum."""
        return ShellSum(self.in_quotes(text), self._values.get, self._values.put).value()

    def _output_of(self, command: str) -> str:
        """The output of a command."""
        output = self._printed(command)
        return unknown(f"$({command.strip()})") if output is None else output.rstrip("\n")

    def _split(self, word: str) -> Iterator[str]:
        """The fields of a word; its unquoted parts are cut at white space."""
        found, started = "", False
        for piece, quoted, ends in self._pieces(word):
            if quoted:
                found, started = found + piece, True
            else:
                for place, part in enumerate(re.split(r"[ \t\n]+", piece)):
                    if place:
                        if found or started:
                            yield found
                        found, started = "", False
                    found += part
            if ends and (found or started):  # only between entries of an array
                yield found
                found, started = "", False
        if found or started:
            yield found

    def _pieces(self, word: str) -> Iterator[tuple[str, bool, bool]]:
        """Texts, whether they are quoted, and whether a field ends after them."""
        place = 0
        if word == "~" or word.startswith("~/"):
            yield self._values.get("HOME"), True, False
            place = 1
        while place < len(word):
            end = after_piece(word, place)
            piece, letter = word[place:end], word[place]
            if letter == "\\":
                yield piece[1:] if piece != "\\\n" else "", True, False
            elif letter == "'":
                yield piece[1:-1], True, False
            elif letter == '"':
                yield from self._quoted(piece[1:-1])
            elif letter == "$" and word[end : end + 1] == "'":  # $'...'
                place, end = end, after_piece(word, end)
                yield (
                    word[place + 1 : end - 1].replace("\\n", "\n").replace("\\t", "\t"),
                    True,
                    False,
                )
            elif letter == "`" or letter == "$":
                if letter == "$" and len(piece) == 1 and (name := _PLAIN.match(word, end)):
                    end = name.end()
                    piece = f"${name[0]}"
                yield from self._expansion(piece, quoted=False)
            else:
                yield piece, letter not in " \t\n", False
            place = end

    def _quoted(self, text: str) -> Iterator[tuple[str, bool, bool]]:
        if (array := _WHOLE.fullmatch(text)) and not self._parameter(array[1] or array[2]):
            return  # an array without entries leaves no field
        yield "", True, False
        place = 0
        while place < len(text):
            if text[place] == "\\" and text[place + 1 : place + 2] in ("$", "`", '"', "\\", "\n"):
                yield text[place + 1].replace("\n", ""), True, False
                place += 2
            elif text[place] == "`" or (text[place] == "$" and text[place + 1 : place + 2]):
                end = after_piece(text, place)
                if end == place + 1 and (name := _PLAIN.match(text, end)):
                    end = name.end()
                yield from self._expansion(text[place:end], quoted=True)
                place = end
            else:
                yield text[place], True, False
                place += 1

    def in_quotes(self, text: str) -> str:
        """A text as it is between double quotes, or in a here-document."""
        return "".join(f"{piece} " if ends else piece for piece, _, ends in self._quoted(text))

    def _expansion(self, piece: str, quoted: bool) -> Iterator[tuple[str, bool, bool]]:
        if piece == "$":
            yield piece, True, False
        elif piece.startswith("$(("):
            yield self.sum(piece[3:-2]), quoted, False
        elif piece.startswith("$("):
            yield self._output_of(piece[2:-1]), quoted, False
        elif piece.startswith("`"):
            yield self._output_of(piece[1:-1].replace("\\`", "`")), quoted, False
        else:
            inner = piece[2:-1] if piece.startswith("${") else piece[1:]
            found = self._parameter(inner)
            if isinstance(found, str):
                yield found, quoted, False
            elif (quoted and inner[:1] == "*") or "[*]" in inner:
                yield known_part(self._values.get("IFS"))[:1].join(found), quoted, False
            else:
                last = len(found) - 1
                yield from ((one, quoted, place < last) for place, one in enumerate(found))

    def _parameter(self, text: str) -> str | list[str]:
        """The value of an expression in ${}."""
        values = self._values
        if text.startswith("#") and (array := re.fullmatch(r"#(\w+)\[[@*]\]", text)):
            return str(len(values.several(array[1])))
        if text.startswith("#") and len(text) > 1:
            return str(len(known_part(values.get(text[1:]))))
        parts = _PARAMETER.fullmatch(text)
        if parts is None:
            raise ConfigError(f"${{{text}}} is not read here")
        through, name, index, how = parts.groups()
        if through and index in ("@", "*"):
            return values.keys(name)
        if through:
            name = values.get(name)
        if name in ("@", "*") or index in ("@", "*"):
            many = values.several(name)
            if how.startswith(":") and how[1:2] not in ("-", "+", "=", "?"):
                return many[_slice(self, how, name in ("@", "*"))]
            if how[:1] not in ("", ":", "-", "+"):
                return [_changed(self, one, how) for one in many]
            if how and bool(many) == ("+" in how[:2]):
                return self.text(re.sub(r"^:?[-+=]", "", how))
            return many
        value = values.get(name, None if index is None else self._index(name, index))
        put = re.match(r":?[=?+-]", how)
        if put is None or (how[0] == ":" and put[0] == ":"):
            return _changed(self, value, how) if how else value
        return self._instead(name, value, put[0], how[put.end() :])

    def _index(self, name: str, index: str) -> str:
        text = self.text(index)
        keyed = any(not key.isdecimal() for key in self._values.keys(name))
        return text if keyed or not text or is_unknown(text) else self.sum(text)

    def _instead(self, name: str, value: str, how: str, other: str) -> str:
        """A value, or its replacement if there is none."""
        missing = is_unknown(value) or (how[0] == ":" and not value)
        if how[-1] == "+":
            return "" if missing else self.text(other)
        if not missing:
            return value
        if how[-1] == "?":
            return value
        found = self.text(other)
        if how[-1] == "=":
            self._values.put(name, found)
        return found


def words_of(text: str) -> Iterator[str]:
    """The words of a text, as they are written, without comments."""
    place = 0
    while place < len(text):
        if text[place].isspace() or text.startswith("\\\n", place):
            place += 1 if text[place] != "\\" else 2
        elif text[place] == "#":
            place = (text + "\n").index("\n", place)
        else:
            end = end_of_word(text, place, " \t\r\n")
            yield text[place:end]
            place = max(end, place + 1)


def matches(value: str, pattern: str) -> bool:
    """Whether a pattern with *, ? and [] matches a text."""
    return re.fullmatch(_pattern(pattern), value, re.DOTALL) is not None


def _pattern(pattern: str) -> str:
    return translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _trimmed(value: str, pattern: str, ends: str) -> str:
    places = range(len(value) + 1)
    if ends[0] == "#":
        order = places if len(ends) == 1 else reversed(places)
        return next((value[n:] for n in order if matches(value[:n], pattern)), value)
    order = reversed(places) if len(ends) == 1 else places
    return next((value[:n] for n in order if matches(value[n:], pattern)), value)


def _braced(word: str) -> list[str]:
    """A word, or several where it has alternatives in braces."""
    if word[:1] in "'\"" or not (found := list(_BRACES.finditer(word))):
        return [word]
    alternatives: list[list[str]] = []
    for each in found:
        if "," in each[1]:
            alternatives.append(each[1].split(","))
            continue
        first, last, *step = map(int, each[1].split(".."))
        by = max(abs(step[0] if step else 1), 1) * (1 if first <= last else -1)
        span = range(first, last + (1 if by > 0 else -1), by)
        alternatives.append([str(number) for number in span[:_MOST]])
    between = _BRACES.sub("\x00", word).split("\x00")
    return [
        "".join(part for pair in zip(between, (*chosen, ""), strict=True) for part in pair)
        for chosen in product(*alternatives)
    ]


def _slice(expander: Expander, how: str, of_arguments: bool) -> slice:
    first, *count = (int(expander.sum(part)) for part in how[1:].split(":"))
    begin = max(first - of_arguments, 0) if first >= 0 else first
    return slice(begin, begin + count[0] if count else None)


def _changed(expander: Expander, value: str, how: str) -> str:
    """A text with its beginning or end cut off, parts replaced or cut out, or its case changed."""
    if missing := list(unknown_names(value)):
        return "".join(map(unknown, missing))
    if how in ("^^", ",,"):
        return value.upper() if how == "^^" else value.lower()
    if how in ("^", ","):
        return (value[:1].upper() if how == "^" else value[:1].lower()) + value[1:]
    if how.startswith(":"):
        return value[_slice(expander, how, False)]
    if ends := re.match(r"##?|%%?", how):
        return _trimmed(value, expander.text(how[ends.end() :]), ends[0])
    if how.startswith("/"):
        every = how.startswith("//")
        old, _, new = how[1 + every :].partition("/")
        pattern = _pattern(expander.text(old))
        return re.sub(pattern, lambda _: expander.text(new), value, count=0 if every else 1)
    raise ConfigError(f"${{...{how}}} is not read here")
