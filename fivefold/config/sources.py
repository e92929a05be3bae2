"""Builds a Config from defaults, a recipe (TOML) and flags, each overriding the one before."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Generic, TypeVar

from fivefold.config.config import SECTION_OF, SECTION_SETTINGS, SECTIONS, SETTINGS, Config
from fivefold.config.flags import ALIASES, SWITCHES, Given, add_bad_value, scan
from fivefold.config.foreign import foreign, name_of
from fivefold.config.huggingface import read_adapter
from fivefold.config.model import ModelConfig
from fivefold.config.presets import HUB_NAMES, PRESETS, model_note, resolve_model
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.settings import Setting, flag_of, settings_of
from fivefold.errors import ConfigError, Mistake, Mistakes, did_you_mean, shown
from fivefold.files import parse_toml, read_text
from fivefold.hub import CONFIG_ALONE, in_place, model_named

T = TypeVar("T")
_log = logging.getLogger(__name__)

RECIPES = Path(__file__).parent.parent / "recipes"
PRESET = "preset"  # key of [model] whose value is what --model takes

MODEL = Setting(
    name="model",
    kind=str,
    default=None,
    help="preset, hub name, or path of a config.json; replaces all of the recipe's [model]",
)


def recipe_names() -> list[str]:
    """The recipes that come with Fivefold."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_options(argv: Sequence[str], options: type[T]) -> T:
    """A command's own options, from its command line.

    Raises:
        ConfigError: all mistakes of the command line.
    """
    mistakes = Mistakes()
    given = scan(argv, settings_of(options), mistakes)
    loaded = _options(options, given, mistakes)
    mistakes.raise_if_any()
    assert loaded is not None
    return loaded


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """The options and the configuration of a command line, and the origin of each setting.

    Attributes:
        options: the command's own options.
        config: the configuration.
        by_flag: names of the settings that were given by flags.
        by_recipe: names of the settings that were given by the recipe only.
        model: the model's name: its preset, hub name or path, or that of the recipe that has its
            sizes; None if flags alone have them.
    """

    options: T
    config: Config
    by_flag: frozenset[str]
    by_recipe: frozenset[str]
    model: str | None


def load(
    argv: Sequence[str], options: type[T], note: Callable[[str], None] = _log.info
) -> tuple[T, Config]:
    """A command's options and configuration, from its command line.

    Settings of the recipe that a flag makes ineffective are left out, for example those of tensor
    parallelism if a flag asks for a single rank.

    Args:
        argv: words after the name of the command.
        options: dataclass with a field `recipe`, which may be None.
        note: function that gets a message about each setting that is left out.

    Raises:
        ConfigError: all mistakes of the flags and of the recipe.
    """
    loaded = load_with_origins(argv, options, note)
    return loaded.options, loaded.config


def load_with_origins(
    argv: Sequence[str],
    options: type[T],
    note: Callable[[str], None] = _log.info,
    *,
    models: bool = False,
    ignored: Collection[str] = (),
) -> Loaded[T]:
    """The same as `load`, with the origin of each setting.

    Args:
        argv: as `load`.
        options: as `load`.
        note: as `load`.
        models: whether a value of --model may be given in place of a recipe.
        ignored: names of the settings that the command does not take from recipes, of which there
            is nothing to say.
    """
    mistakes = Mistakes()
    given = scan_all(argv, options, mistakes)
    loaded = _options(options, given, mistakes)
    recipe = getattr(loaded, "recipe", None)
    if models and recipe is not None and not _is_recipe(recipe):
        given.values.setdefault("model", recipe)
        recipe = None
    written = _written(recipe, mistakes)
    config = _config(written, given, mistakes)
    mistakes.raise_if_any()
    assert loaded is not None and config is not None
    by_flag = frozenset(given.values)
    in_recipe = frozenset(name for section in written.values() for name in section)
    config, left_out = without_orphans(config, by_flag)
    for orphan in (each for each in left_out if each.name not in ignored):
        note(f"{orphan.shown} of the recipe is left out: {orphan.why}")
    model = given.values.get("model") or written.get("model", {}).get(PRESET) or recipe
    if model is not None and (its_note := model_note(model)) is not None:
        note(its_note)
    return Loaded(loaded, config, by_flag, in_recipe - by_flag, model)


def scan_all(argv: Sequence[str], options: type, mistakes: Mistakes) -> Given:
    """The flags and words of a command line, which may set a command's options and any setting."""
    of_all = [*settings_of(options), MODEL, *SETTINGS.values()]
    return scan(argv, of_all, mistakes, SWITCHES)


def _is_recipe(name: str) -> bool:
    """Whether a name means a recipe rather than a value of --model."""
    return name in recipe_names() or Path(name).suffix == ".toml"


def read_config(recipe: str | Path | None = None, **values: Any) -> Config:
    """The Config of a recipe (a path or the name of a shipped one) with some values changed.

    Raises:
        ConfigError: all mistakes of the recipe.
    """
    mistakes = Mistakes()
    written = _written(None if recipe is None else str(recipe), mistakes)
    config = _config(written, Given(values), mistakes)
    mistakes.raise_if_any()
    assert config is not None
    return config


def to_toml(config: Config, *, changes_only: bool = False) -> str:
    """The recipe of a configuration, with all settings or only those that are not defaults."""
    lines = []
    for (section, settings), (_, values) in zip(
        SECTION_SETTINGS.items(), config.sections(), strict=True
    ):
        written = [(s, getattr(values, s.name)) for s in settings]
        kept = [(s, v) for s, v in written if not changes_only or v != s.default]
        if kept or not changes_only:
            lines.append(f"[{section}]")
            lines += [f"{s.name} = {s.to_toml(value)}" for s, value in kept]
            lines.append("")
    return "\n".join(lines)


def _options(options: type[T], given: Given, mistakes: Mistakes) -> T | None:
    values: dict[str, Any] = {}
    words = list(given.words)
    missing = False
    for setting in settings_of(options):
        if setting.positional and words:
            word = words.pop(0)
            try:
                values[setting.name] = setting.from_text(word)
            except ValueError:
                missing = True
                add_bad_value(setting.name.upper(), setting, word, mistakes)
        elif not setting.positional and setting.name in given.values:
            values[setting.name] = value = given.values[setting.name]
            if wrong := setting.beyond(value):
                mistakes.add(f"{setting.flag} {wrong}")
        elif setting.default is MISSING:
            missing = True
            name = setting.name.upper() if setting.positional else setting.flag
            mistakes.add(f"{name} is missing: {setting.help}")
    for word in words:
        mistakes.add(f"unexpected argument {word!r}")
    return None if missing else options(**values)


def _written(recipe: str | None, mistakes: Mistakes) -> dict[str, dict[str, Any]]:
    """The values of a recipe by section; empty if there is no recipe."""
    if recipe is not None:
        with mistakes.collecting():
            return _read_recipe(recipe)
    return {}


def _config(
    written: Mapping[str, Mapping[str, Any]], given: Given, mistakes: Mistakes
) -> Config | None:
    found_before = mistakes.found
    sections: dict[str, Any] = {}
    for name, settings in SECTION_SETTINGS.items():
        flags = {s.name: given.values[s.name] for s in settings if s.name in given.values}
        if name == "model":
            adapter = written.get("checkpoint", {}).get("load_adapter")
            adapter = given.values.get("load_adapter", adapter)
            flags = _of_adapter(adapter, written.get(name, {}), mistakes) | flags
            sections[name] = _model(written.get(name, {}), flags, given, mistakes, found_before)
        else:
            sections[name] = SECTIONS[name](**{**written.get(name, {}), **flags})
    return None if mistakes.found else Config(**sections)


def _of_adapter(
    folder: str | None, written: Mapping[str, Any], mistakes: Mistakes
) -> dict[str, Any]:
    """Settings of the adapters that a run starts from, unless a recipe gives them."""
    if folder is not None and "lora_rank" not in written:
        with mistakes.collecting():
            return dict(read_adapter(in_place(folder, CONFIG_ALONE, _log.info)).settings)
    return {}


def _model(
    written: Mapping[str, Any],
    flags: Mapping[str, Any],
    given: Given,
    mistakes: Mistakes,
    found_before: bool,
) -> ModelConfig | None:
    """The model: the preset, the recipe's changes to it, then flags; --model replaces the recipe.

    A missing model is not reported if other mistakes were found before.
    """
    written = dict(written)
    name = written.pop(PRESET, None)
    if "model" in given.values:
        name, written = given.values["model"], {}
    values = written | dict(flags)
    if name is not None:
        with mistakes.collecting():
            values = vars(resolve_model(name)) | values
    required = [s for s in SECTION_SETTINGS["model"] if s.default is MISSING]
    missing = [s.flag for s in required if s.name not in values]
    if missing:
        if not found_before and name is None:
            mistakes.add(
                f"no model: {', '.join(missing)} missing",
                f"a recipe has one ({' '.join(recipe_names())}, or the path of a .toml file), and "
                "so has --model: a preset, a hub name, or the path of a config.json",
                works=_models_beside(given.values.get("load")),
            )
        return None
    model = ModelConfig(**values)
    if "group_query_attention" in given.switches and model.num_query_groups is None:
        mistakes.add("--group-query-attention needs --num-query-groups, the key/value heads")
    for switch in ("moe_grouped_gemm", "moe_permute_fusion"):
        if switch in given.switches and model.num_experts is None:
            mistakes.add(f"{flag_of(switch)} needs a model with --num-experts")
    return model


def _models_beside(weights: str | None) -> tuple[str, ...]:
    """The model that the config.json beside the starting weights describes, if there is one."""
    if weights is not None and (model_named(weights) or Path(weights, "config.json").is_file()):
        return (f"--model {quote(weights)}",)
    return "--model llama3-8b", "--model debug-llama"


def _read_recipe(recipe: str) -> dict[str, dict[str, Any]]:
    """The values of a recipe by section, with their types checked."""
    path = _find_recipe(recipe)
    tables = parse_toml(read_text(path, ConfigError), str(path), ConfigError)
    mistakes = Mistakes()
    values = {
        section: _read_section(section, table, path, mistakes) for section, table in tables.items()
    }
    mistakes.raise_if_any()
    return values


def _find_recipe(recipe: str) -> Path:
    try:
        path = Path(recipe).expanduser()
        is_file, is_folder = path.is_file() or path.is_fifo(), path.is_dir()
    except (OSError, RuntimeError) as problem:  # name too long, or unknown home
        why = getattr(problem, "strerror", None) or str(problem)
        raise ConfigError(f"cannot read the recipe {shown(recipe)}: {why}") from None
    if recipe in recipe_names():  # even if the folder has a file of that name
        return RECIPES / f"{recipe}.toml"
    if is_file:
        return path
    if recipe in (*PRESETS, *HUB_NAMES) or (path / "config.json").is_file():
        what, why = f"{shown(recipe)} is a model, not a recipe", ("give it by a flag instead",)
        raise ConfigError(Mistake(what, why, works=(f"--model {quote(recipe)}",)))
    if is_folder:
        what, of_run = f"a recipe is a .toml file, not a folder: {recipe}", path / "config.toml"
        works = (quote(str(of_run)),) if of_run.is_file() else ()
        raise ConfigError(Mistake(what, works=works))
    if path.suffix == ".toml" or "/" in recipe:
        near = [p.name for p in path.parent.glob("*.toml")]
        raise ConfigError(f"no such recipe file: {recipe}{did_you_mean(path.name, near)}")
    names = recipe_names()
    what = f"unknown recipe {recipe!r}{did_you_mean(recipe, names)}"
    raise ConfigError(Mistake(what, ("or the path of a .toml file",), works=tuple(names)))


def _read_section(section: str, table: Any, path: Path, mistakes: Mistakes) -> dict[str, Any]:
    owner = {**SECTION_OF, PRESET: "model"}
    if section not in SECTIONS:
        if not isinstance(table, dict) and section in owner:
            mistakes.add(f"{path}: {section} belongs in [{owner[section]}], not above all sections")
        elif not isinstance(table, dict):
            mistakes.add(f"{path}: unknown key {section!r}{_meant(section, owner)}")
        else:
            suggestion = did_you_mean(section, SECTIONS)
            mistakes.add(f"{path}: unknown section [{section}]{suggestion}", works=SECTIONS)
        return {}
    if not isinstance(table, dict):
        mistakes.add(
            f"{path}: {section} is a section: write [{section}] and its keys below, not "
            f"{section} = {shown(table)}"
        )
        return {}
    values: dict[str, Any] = {}
    settings = {s.name: s for s in SECTION_SETTINGS[section]}
    if section == "model":
        settings[PRESET] = MODEL
    for key, value in table.items():
        place = f"{path}: [{section}] {key}"
        if key in settings:
            try:
                values[key] = settings[key].from_toml(value)
            except ValueError:
                add_bad_value(place, settings[key], value, mistakes)
        elif key in owner:
            mistakes.add(f"{place} belongs in [{owner[key]}]")
        else:
            mistakes.add(f"{path}: unknown key {key!r} in [{section}]{_meant(key, owner)}")
    return values


def _meant(key: str, owner: Mapping[str, str]) -> str:
    name = key.replace("-", "_")
    name = name_of(foreign(name).meant([*owner, *ALIASES]) or f"--{name}")
    name = ALIASES.get(name, name)
    suffix = did_you_mean(name, owner)
    if suffix and owner.get(name):
        return f", did you mean {name!r} in [{owner[name]}]?"
    return suffix
