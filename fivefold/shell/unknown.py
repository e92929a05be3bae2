"""Texts of which only the caller of a script knows a part.

Where a variable has no value, a text has its name between two characters of Unicode's private use,
so that whoever uses the text can tell what is missing. Letters of a name that a shell would read
stand there as others of the private use.
"""

import re
from collections.abc import Iterator

_BEFORE, _AFTER, _HIDING = "\ue000", "\ue001", 0xE100
_MARK = re.compile(f"{_BEFORE}([^{_AFTER}]*){_AFTER}")


def unknown(name: str) -> str:
    """A text of which only the origin is known, such as "1" or "$(date)"."""
    hidden = re.sub(r"[\x00-\x7f]", lambda found: _hidden(found[0]), readable(name))
    return f"{_BEFORE}{hidden}{_AFTER}"


def _hidden(letter: str) -> str:
    return letter if letter.isalnum() or letter == "_" else chr(_HIDING + ord(letter))


def _shown(name: str) -> str:
    return "".join(
        chr(ord(letter) - _HIDING) if 0 <= ord(letter) - _HIDING < 128 else letter
        for letter in name
    )


def unknown_names(text: str) -> Iterator[str]:
    """The unknown parts of a text, each once."""
    yield from dict.fromkeys(map(_shown, _MARK.findall(text)))


def known_part(text: str) -> str:
    """A text as a shell sees it if unknown variables are not set."""
    return _MARK.sub("", text)


def is_unknown(text: str) -> bool:
    """Whether a text is not empty and wholly unknown."""
    return bool(text) and not known_part(text)


def begins_unknown(text: str) -> bool:
    """Whether a text begins with an unknown part."""
    return _MARK.match(text) is not None


def readable(text: str) -> str:
    """A text for people, with unknown parts spelled as in the script."""
    return _MARK.sub(lambda mark: dollar(_shown(mark[1])), text)


def dollar(name: str) -> str:
    """How a script spells an unknown part.

    >>> dollar("TP"), dollar("11"), dollar("$(date)")
    ('$TP', '${11}', '$(date)')
    """
    if name.startswith(("$", "`")):
        return name
    return f"${{{name}}}" if name.isdecimal() and len(name) > 1 else f"${name}"
