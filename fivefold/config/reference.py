"""Writes the descriptions of all flags from the dataclasses: for --help and the reference page."""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from inspect import getdoc
from typing import TextIO

from fivefold.config.config import SECTION_SETTINGS, SECTIONS
from fivefold.config.flags import ALIASES, IDLE_SWITCHES, SWITCHES
from fivefold.config.foreign import foreign, name_of, without_entry
from fivefold.config.presets import PRESETS
from fivefold.config.settings import NONE, Setting, flag_of, name_of_flag, settings_of
from fivefold.config.sources import MODEL, recipe_names
from fivefold.errors import ConfigError, Mistake, did_you_mean
from fivefold.units import several, wrapped

MAX_WIDTH = 100
USUAL = (
    "model",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_sharding_strategy",
    "recompute_granularity",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "train_iters",
    "precision",
    "compile",
    "data_path",
    "tokenizer_model",
    "lr",
    "save",
    "load",
    "save_interval",
    "eval_interval",
)
"""The settings with which the help of a run begins."""


def help_text(verb: str, options: type, stream: TextIO, topic: str | None) -> str:
    """The help of a command: its own arguments, and settings of a run if it takes a recipe.

    Args:
        verb: the command.
        options: the dataclass of its own arguments.
        stream: where the text is printed, whose width it keeps.
        topic: None for the settings that most people use, `all` for every one, the name of a
            section or of a flag, or a word, for the settings whose description has it.

    Raises:
        ConfigError: there is no such topic.
    """
    columns = shutil.get_terminal_size().columns if stream.isatty() else MAX_WIDTH
    width = min(columns, MAX_WIDTH)
    own, sections = _own_and_sections(options)
    named = None if topic in (None, "all", *sections) else topic
    if named is not None:
        settings = [*own, *_of(sections)]
        if lines := _named(named, settings, width) or _mentioning(named, settings, width):
            return "\n".join(lines)
        what = f"fivefold {verb} has no section and no flag {named!r}{_meant(named, settings)}"
        works = (f"fivefold {verb} --help", f"fivefold {verb} --help all")
        raise ConfigError(Mistake(what, works=works))
    shown = [*sections] if topic == "all" else [name for name in sections if name == topic]
    lines = [] if topic in sections else [*_own_lines(verb, options, own, width)]
    if sections and topic == "all":
        lines += _entry(MODEL, width)
    if sections and topic is None:
        lines += _usual_lines(verb, sections, width)
    for section in shown:
        lines += ["", _filled(f"[{section}] {_summary(SECTIONS[section])}", width)]
        lines += _entries(sections[section], width)
    if sections and topic == "all":
        lines += ["", "Megatron-LM's switches"]
        lines += map(_switch, SWITCHES)
    return "\n".join(lines).lstrip("\n")


def is_topic(topic: str, options: type) -> bool:
    """Whether the help of a command, with its own arguments `options`, has a section, setting or
    flag of this name."""
    own, sections = _own_and_sections(options)
    flags = (setting for setting in own if not setting.positional)
    return topic in sections or bool(_named(topic, [*flags, *_of(sections)], MAX_WIDTH))


def is_word(topic: str) -> bool:
    """Whether the name, description or values of any setting contain these words."""
    return bool(_mentioning(topic, _of(SECTION_SETTINGS), MAX_WIDTH))


def resembles_topic(topic: str) -> bool:
    """Whether a section or a setting has a similar name."""
    return bool(_meant(topic, _of(SECTION_SETTINGS)))


def _meant(topic: str, settings: Iterable[Setting]) -> str:
    return did_you_mean(name_of(topic), [*SECTIONS, *(setting.name for setting in settings)])


def _own_and_sections(
    options: type,
) -> tuple[list[Setting], Mapping[str, Sequence[Setting]]]:
    """A command's own arguments, and the settings of a run if it takes a recipe."""
    own = list(settings_of(options))
    return own, SECTION_SETTINGS if any(s.name == "recipe" for s in own) else {}


def _own_lines(verb: str, options: type, own: list[Setting], width: int) -> Iterator[str]:
    words = [_place(s) for s in own if s.positional]
    yield " ".join(["usage: fivefold", verb, *words, "[flags]"])
    paragraphs = (getdoc(options) or "").split("\n\n")
    yield from ("", "\n\n".join(_filled(text, width) for text in paragraphs), "")
    yield from _entries(own, width)


def _usual_lines(verb: str, sections: Mapping[str, Sequence[Setting]], width: int) -> Iterator[str]:
    yield from ("", "Settings that most runs name")
    of_all = {setting.name: setting for setting in _of(sections)}
    yield from _entries((of_all[name] for name in USUAL), width)
    rest = len(of_all) - len(USUAL)
    yield ""
    more = f"{rest} more: fivefold {verb} --help all, or of a section or flag, as --help memory:"
    yield _filled(more, width)
    start = max(map(len, sections)) + 4
    for section in sections:
        yield _filled(_summary(SECTIONS[section]), width, f"  {section}".ljust(start), " " * start)
    yield "\n" + _filled(f"recipes: {', '.join(recipe_names())}", width)


def _of(sections: Mapping[str, Sequence[Setting]]) -> Iterator[Setting]:
    """All settings of a run, including --model."""
    if sections:
        yield MODEL
    for settings in sections.values():
        yield from settings


def _named(topic: str, settings: Iterable[Setting], width: int) -> list[str]:
    """The description of a flag, also by a short name or another trainer's name, of which it says
    what differs, or why there is no flag; empty: none."""
    of_all = {setting.name: setting for setting in settings}
    known = {**of_all, **{alias: of_all[n] for alias, n in ALIASES.items() if n in of_all}}
    name, theirs = name_of(topic), foreign(name_of_flag(topic), known)
    meant = known.get(name_of(theirs.meant(known)))
    of_runs = of_all.get(MODEL.name) is MODEL
    if setting := known.get(name, meant):
        lines = [*_entry(setting, width)]
    else:
        lines = [_switch(name)] if name in SWITCHES and of_runs else []
    note = theirs.note
    if not lines and of_runs and not theirs.note:
        note = without_entry(flag_of(name_of_flag(topic)))
    if name not in known and note and (meant or (of_runs and not theirs.flags)):
        lines.append(_filled(f"{topic} of other trainers: {note}", width, "  ", "  "))
    return lines


def _mentioning(topic: str, settings: Iterable[Setting], width: int) -> list[str]:
    """Settings whose name, description or values contain words that begin so; empty: none."""
    sought = _words(topic)
    found = [
        setting
        for setting in settings
        if sought in _words(" ".join((setting.name, setting.help, *setting.choices)))
    ]
    if not found or not sought.strip():
        return []
    title = f"{several(len(found), 'setting')} with {topic!r}"
    return [_filled(title, width), *_entries(found, width)]


def _words(text: str) -> str:
    """The words of a text in lower case, each after a space."""
    return "".join(f" {word}" for word in re.findall(r"[a-z0-9]+", text.lower()))


def _entries(settings: Iterable[Setting], width: int) -> Iterator[str]:
    for setting in settings:
        yield from _entry(setting, width)


def _entry(setting: Setting, width: int) -> Iterator[str]:
    head = setting.name.upper() if setting.positional else ", ".join(_spellings(setting))
    default = _default(setting)
    yield f"  {head}" + (f"  (default {default})" if default else "")
    text = setting.help
    if setting.choices:
        text += f": {' | '.join(setting.choices)}"
    indent = " " * 8
    yield _filled(text, width, indent, indent)


def _filled(text: str, width: int, first: str = "", others: str = "") -> str:
    return "\n".join(wrapped(text, width, first, others))


def _spellings(setting: Setting) -> list[str]:
    """The flag with a placeholder for its value, and its aliases."""
    short = [flag_of(alias) for alias, of in ALIASES.items() if of == setting.name]
    if setting.kind is bool:
        return [setting.typed(setting.default is not True), *short]
    word = {int: "N", float: "X", str: "WORD"}[setting.kind] + ("..." if setting.many else "")
    return [f"{setting.flag} {word}", *short]


def _default(setting: Setting) -> str:
    """The default as a user would write it; empty for None and for switches that are off."""
    value = setting.default
    if value is MISSING or value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    return (
        " ".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def reference_page() -> str:
    """The text of docs/reference/flags.md."""
    return "\n".join(_page_lines()) + "\n"


def _page_lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield (
        "Every setting is a key of its section in a recipe, and a flag of every command that "
        "takes a recipe: `micro_batch_size = 2` under `[training]`, or `--micro-batch-size 2`. "
        "Flags override the recipe. A switch is turned on by `--name` and off by `--no-name`; "
        f'`{NONE}` stands for no value, in TOML as `"{NONE}"`. '
        "This page is written by `python -m fivefold.docs`."
    )
    yield ""
    yield (
        "A setting that has an effect only together with another one is refused without it, with "
        "a message that says what to add (`--recompute-modules mlp` needs "
        "`--recompute-granularity selective`). A recipe's setting that a flag makes ineffective, "
        "such as `sequence_parallel` with `--tp 1`, is left out, with a note; if both are flags, "
        "it is an error."
    )
    for section, settings in SECTION_SETTINGS.items():
        yield from ("", f"## [{section}]", "", _summary(SECTIONS[section]), "")
        if section == "model":
            yield (
                'A recipe may start from `preset = "llama3-8b"` (a preset, a hub name, or the '
                "path of a Hugging Face config.json) and change it by further keys; "
                "`--model NAME` replaces the whole section. Presets: "
                f"{', '.join(f'`{name}`' for name in PRESETS)}."
            )
            yield ""
        yield from _table(settings)
    yield from ("", "## Other spellings", "", "| flag | means |", "|---|---|")
    for alias, name in ALIASES.items():
        yield f"| `{flag_of(alias)}` | `{flag_of(name)}` |"
    for switch, implied in SWITCHES.items():
        yield f"| `{flag_of(switch)}` | {_implied(switch, implied)} |"


def _table(settings: Iterable[Setting]) -> Iterator[str]:
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for setting in settings:
        value = setting.expected.removeprefix("one of ").replace("|", "\\|")
        value += f"; {setting.within.words}" if setting.within else ""
        default = _default(setting) or ("off" if setting.default is False else "")
        shown = f"`{default}`" if default else "required" if setting.default is MISSING else ""
        text = setting.help.replace("|", "\\|")
        yield f"| `{setting.name}` | {value} | {shown} | {text} |"


def _switch(name: str) -> str:
    return f"  {flag_of(name):<38}{_implied(name, SWITCHES[name])}"


def _implied(name: str, implied: Mapping[str, object]) -> str:
    return IDLE_SWITCHES.get(name) or ", ".join(
        f"{name} = {_shown(value)}" for name, value in implied.items()
    )


def _shown(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value).lower()


def _place(setting: Setting) -> str:
    name = setting.name.upper()
    return name if setting.default is MISSING else f"[{name}]"


def _summary(cls: type) -> str:
    return (getdoc(cls) or "").split("\n")[0]
