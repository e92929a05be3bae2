"""What `read` and `mapfile` make of a text that a script gives them."""

import re
from collections.abc import Sequence

from fivefold.shell.variables import Variables


def read_into(
    variables: Variables, name: str, words: Sequence[str], text: str, separators: str
) -> bool:
    """Give variables the parts of a text; returns whether the command succeeds.

    Args:
        variables: those of the script.
        name: "read", "mapfile" or "readarray".
        words: what it is called with.
        text: what it reads.
        separators: letters between parts, IFS.
    """
    flags = "".join(word[1:] for word in words if word.startswith("-"))
    names = [word for word in words if word and not word.startswith("-")] or ["REPLY"]
    if name != "read":
        lines = text.removesuffix("\n").split("\n")
        variables.put_array(names[-1], [(None, line) for line in lines], more=False)
        return True
    whole = "d" in flags
    line = text if whole else text.partition("\n")[0]
    parts = _parts(line, separators, 0 if "a" in flags else len(names))
    if "a" in flags:
        variables.put_array(names[-1], [(None, part) for part in parts], more=False)
    else:
        for number, each in enumerate(names):
            variables.put(each, parts[number] if number < len(parts) else "")
    return not whole


def _parts(line: str, separators: str, most: int) -> list[str]:
    """The parts of a line, the last of which may hold further ones; `most` 0: any number."""
    blank = "".join(each for each in separators if each.isspace())
    others = "".join(each for each in separators if not each.isspace())
    line = line.strip(blank) if blank else line
    if not line or not separators:
        return [line] if line else []
    spaces = f"[{re.escape(blank)}]" if blank else "(?!)"
    between = f"{spaces}*[{re.escape(others)}]{spaces}*|{spaces}+" if others else f"{spaces}+"
    found = re.split(between, line, maxsplit=max(most - 1, 0)) if most != 1 else [line]
    return found[:-1] if others and found[-1] == "" and most != 1 else found
