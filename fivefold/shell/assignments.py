"""Assignments to the variables of a script."""

import re
from collections.abc import Sequence

from fivefold.shell.expansion import Expander
from fivefold.shell.unknown import known_part
from fivefold.shell.variables import Variables

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")


def assigned(variables: Variables, expander: Expander, words: Sequence[str]) -> Sequence[str]:
    """Give the variables before a command, or in one that declares them, their values; what is left
    of the command."""
    place = 0
    while place < len(words) and (parts := ASSIGNMENT.fullmatch(words[place])):
        if parts[1] != "IFS" or ASSIGNMENT.fullmatch(words[-1]):  # else it is of the command alone
            _assign(variables, expander, *parts.groups())
        place += 1
    if place == len(words) or words[place] not in DECLARING:
        return words[place:]
    for word in words[place + 1 :]:
        if parts := ASSIGNMENT.fullmatch(word):
            _assign(variables, expander, *parts.groups())
    return ()


def _assign(
    variables: Variables, expander: Expander, name: str, index: str | None, more: str, text: str
) -> None:
    if text.startswith("(") and text.endswith(")"):
        variables.put_array(name, expander.entries(text[1:-1]), bool(more))
        return
    value = expander.text(text)
    key = None if index is None else known_part(expander.text(index))
    if more and variables.is_set(name):
        value = variables.get(name, key) + value
    variables.put(name, value, key)
