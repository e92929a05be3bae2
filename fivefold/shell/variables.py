"""The variables of a script."""

from collections.abc import Mapping, Sequence

from fivefold.shell.unknown import unknown

_OF_PROCESSES = {"?": "0", "-": "", "IFS": " \t\n", "RANDOM": unknown("RANDOM")}


class Variables:
    """Values by name; arrays as dictionaries, whose keys are numbers unless they are declared.

    Args:
        environment: variables that are set before the script begins.
        arguments: what the script is called with.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
    ) -> None:
        self._environment = environment
        self._values: dict[str, str | dict[str, str]] = {}
        self._arguments = [list(arguments)]

    @property
    def arguments(self) -> list[str]:
        """The arguments of the script, or of the function that runs."""
        return self._arguments[-1]

    def enter(self, arguments: Sequence[str]) -> None:
        """Begin a function."""
        self._arguments.append(list(arguments))

    def leave(self) -> None:
        """End a function."""
        self._arguments.pop()

    def get(self, name: str, index: str | None = None) -> str:
        """A value; if it has none, a marker that says it is not known."""
        if name in ("@", "*"):
            return " ".join(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name.isdecimal() and name != "0":
            place = int(name) - 1
            return self.arguments[place] if place < len(self.arguments) else unknown(name)
        value = self._values.get(name, self._environment.get(name, _OF_PROCESSES.get(name)))
        if isinstance(value, dict):
            key = index or "0"
            if key.startswith("-") and key[1:].isdecimal():
                key = str(int(key) + 1 + max(map(int, value), default=-1))
            return value.get(key, unknown(f"{name}[{key}]"))
        return unknown(name) if value is None or index not in (None, "0") else value

    def several(self, name: str) -> list[str]:
        """The values of an array; of "@" and "*" the arguments."""
        if name in ("@", "*"):
            return self.arguments
        value = self._values.get(name)
        if isinstance(value, dict):
            return list(value.values())
        return [] if value is None else [value]

    def keys(self, name: str) -> list[str]:
        """The keys of an array."""
        value = self._values.get(name)
        return list(value) if isinstance(value, dict) else []

    def put(self, name: str, value: str, index: str | None = None) -> None:
        """Give a variable, or an entry of an array, another value."""
        known = self._values.get(name)
        if index is None and not isinstance(known, dict):
            self._values[name] = value
        else:
            entries = known if isinstance(known, dict) else {} if known is None else {"0": known}
            self._values[name] = _in_order(entries | {index or "0": value})

    def put_array(self, name: str, entries: Sequence[tuple[str | None, str]], more: bool) -> None:
        """Make an array of entries, or add them to one."""
        before = self._values.get(name) if more else None
        found = (
            dict(before) if isinstance(before, dict) else {} if before is None else {"0": before}
        )
        last = max((int(key) for key in found if key.isdecimal()), default=-1)
        for given, value in entries:
            key = str(last + 1) if given is None else given
            last = max(last, int(key)) if key.isdecimal() else last
            found[key] = value
        self._values[name] = _in_order(found)

    def forget(self, names: Sequence[str]) -> bool:
        """Unset variables, also those of the environment."""
        for name in names:
            self._values.pop(name, None)
        self._environment = {k: v for k, v in self._environment.items() if k not in names}
        return True

    def shift(self, words: Sequence[str]) -> bool:
        """Remove the first arguments; returns whether there were that many."""
        count = int(words[0]) if words and words[0].isdecimal() else 1
        there = count <= len(self.arguments)
        del self.arguments[:count]
        return there

    def set_arguments(self, words: Sequence[str]) -> bool:
        """Replace the arguments by what follows `--`, as `set` does."""
        if "--" in words:
            self.arguments[:] = words[words.index("--") + 1 :]
        return True

    def state(self) -> tuple[dict, list, Mapping[str, str]]:
        """What changes if any variable or argument does."""
        entries = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in self._values.items()
        }
        return entries, [list(words) for words in self._arguments], self._environment

    def put_back(self, state: tuple[dict, list, Mapping[str, str]]) -> None:
        """Forget all that changed since `state()` told this."""
        self._values, self._arguments, self._environment = state

    def is_set(self, name: str) -> bool:
        """Whether a variable has a value."""
        return name in self._values or name in self._environment


def _in_order(entries: dict[str, str]) -> dict[str, str]:
    """Entries in order of their numeric keys, as a shell lists them, or as given if keys are
    words."""
    if not all(map(str.isdecimal, entries)):
        return entries
    return dict(sorted(entries.items(), key=lambda entry: int(entry[0])))
