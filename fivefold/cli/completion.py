"""`fivefold completion`: answers a shell when Tab is pressed, and prints the lines that set this
up."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Literal

from fivefold.cli.main import VERBS
from fivefold.config.config import SECTION_SETTINGS
from fivefold.config.flags import ALIASES, SWITCHES
from fivefold.config.settings import Setting, argument, flag_of, option, settings_of
from fivefold.config.sources import MODEL, load_options, recipe_names

Shell = Literal["bash", "zsh", "fish"]

_BASH = """\
_fivefold() {
    local IFS=$'\\n'
    COMPREPLY=($(fivefold completion bash --line "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null))
}
complete -o default -F _fivefold fivefold
"""
SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        "bash": _BASH,
        "zsh": (
            "(( $+functions[compdef] )) || { autoload -U compinit && compinit -D; }\n"
            f"autoload -U bashcompinit && bashcompinit\n{_BASH}"
        ),
        "fish": (
            "complete -c fivefold "
            "-a '(fivefold completion fish --line (commandline -cp) 2>/dev/null)'\n"
        ),
    }
)


@dataclass(frozen=True)
class Options:
    """Print the code with which a shell completes commands, flags, their values and recipes.

    For bash: `eval "$(fivefold completion bash)"` in ~/.bashrc; for zsh the same in ~/.zshrc; fish:
    `fivefold completion fish > ~/.config/fish/completions/fivefold.fish`.
    """

    shell: Shell = argument("kind of shell")
    line: str | None = option(None, "print what may follow this beginning of a line instead")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    if options.line is None:
        print(SCRIPTS[options.shell], end="")
    else:
        for word in continuations(options.line):
            print(word)
    return 0


def continuations(line: str) -> list[str]:
    """The words that can complete the last word of a line."""
    words = line.split()
    begun = "" if not words or line[-1].isspace() else words.pop()
    return sorted({word for word in _words(words, begun) if word.startswith(begun)})


def _words(before: list[str], begun: str) -> Iterator[str]:
    if len(before) <= 1 or before[1:] == ["help"]:
        yield from (*VERBS, "help", "--help", "--version")
        return
    verb = before[1]
    if verb not in VERBS:
        return
    own = list(settings_of(import_module(f"fivefold.cli.{verb}").Options))
    settings = {setting.name: setting for setting in own}
    if "recipe" in settings:
        settings |= {s.name: s for s in (MODEL, *_of_config())}
    valued = _named(before[-1], settings)
    if valued is not None and valued.kind is not bool:
        yield from valued.choices
        return
    if begun.startswith("-"):
        yield from ("--help", *_flags(settings))
        return
    places = [setting for setting in own if setting.positional]
    yield from (choice for place in places for choice in place.choices)
    if "recipe" in settings:
        yield from recipe_names()


def _of_config() -> Iterator[Setting]:
    for settings in SECTION_SETTINGS.values():
        yield from settings


def _flags(settings: Mapping[str, Setting]) -> Iterator[str]:
    for setting in settings.values():
        if not setting.positional:
            yield setting.typed(False) if setting.default is True else setting.flag
    if "recipe" in settings:
        yield from map(flag_of, (*ALIASES, *SWITCHES))


def _named(word: str, settings: Mapping[str, Setting]) -> Setting | None:
    """The setting that a flag sets."""
    if not word.startswith("--"):
        return None
    name = word[2:].replace("-", "_")
    return settings.get(ALIASES.get(name, name))
