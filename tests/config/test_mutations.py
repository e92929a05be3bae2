"""Files that lie: thousands of broken config.json and TOML files end in a model or in a message."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.huggingface import from_hf_config
from fivefold.config.presets import PRESETS
from fivefold.config.sources import RECIPES, read_config, to_toml
from fivefold.errors import ConfigError
from tests.config.published import PUBLISHED
from tests.config.published_multimodal import MULTIMODAL

FILES = PUBLISHED | MULTIMODAL
TIMES = pytest.mark.parametrize("times", [3_000, pytest.param(5_000, marks=pytest.mark.exhaustive)])

_BYTES = [
    b"",
    b"\x00",
    b"\xff",
    b"\xc3",
    b"{",
    b"[" * 2000,
    b'"',
    b"9" * 5000,
    b"\\",
    b"e999",
    b"=",
]
_VALUES: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (None, True, False, 0, -1, 1, 2, 7, 64, 10**6)),
    *(lambda value=value: value for value in (2**31 - 1, 2**31, 2**63, 10**30, -(10**30))),
    *(lambda value=value: value for value in (0.0, -0.0, 0.5, 1e-320, 1e300, -1e300, 1e308)),
    *(lambda value=value: value for value in (float("nan"), float("inf"), 10**400, 10**5000)),
    *(lambda value=value: value for value in ("", "x", "1e-5", "\0", "none", "silu", "a" * 10**4)),
    lambda: [],
    lambda: {},
    lambda: [None],
    lambda: [1] * 10**4,
    lambda: {"type": "yarn"},
    lambda: {"rope_type": ["llama3"], "rope_theta": {}},
    lambda: {str(i): i for i in range(100)},
    lambda: _nested(900),
]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _mutated_fields(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Some values, at any depth, are others, gone, renamed or exchanged."""
    plain, fields = fields, copy.deepcopy(fields)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        tables = [fields, *(v for v in fields.values() if isinstance(v, dict) and v)]
        table = chance.choice(tables)
        name = chance.choice(list(table) or ["new"])
        kind = chance.randrange(6)
        if kind == 0:
            table.pop(name, None)
        elif kind == 1:
            table[name + "x"] = table.pop(name, 1)
        elif kind == 2 and isinstance(table.get(name), list) and table[name]:
            table[name][chance.randrange(len(table[name]))] = chance.choice(_VALUES)()
        elif kind == 3:
            table[name] = copy.deepcopy(chance.choice([*plain.values()]))
        else:
            table[name] = chance.choice(_VALUES)()
    return fields


def _mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 3))):
        at = chance.randrange(len(data) + 1)
        until = min(len(data), at + chance.choice((0, 1, 1, 10, 1000)))
        data = data[:at] + chance.choice(_BYTES) + data[until:]
    return data


def _is_read(read: Callable[[], Config]) -> bool:
    """Whether a file is read; if it is not, or makes no run, a message says why."""
    config = None
    try:
        config = read()
        check(config, 1, planned=True)
    except ConfigError as error:
        assert str(error).encode()
        assert len(error.mistakes) < 100
    return config is not None


@pytest.mark.slow
@TIMES
@pytest.mark.parametrize("name", FILES)
def test_mutated_config_json_is_answered(name: str, times: int, tmp_path: Path) -> None:
    chance = random.Random(name)
    data = json.dumps(FILES[name], indent=2).encode()
    file = tmp_path / "config.json"
    read = 0
    for turn in range(times // len(FILES) + 1):
        if turn % 4 == 0:
            file.write_bytes(_mutated_bytes(data, chance))
            read += _is_read(lambda: Config(from_hf_config(file)))
        else:
            fields = _mutated_fields(FILES[name], chance)
            read += _is_read(lambda fields=fields: Config(from_hf_config(fields)))
    assert read


_TOML_VALUES = [
    *("1", "-1", "0", "true", "false", '"none"', '""', '"x"', "''", "1.5", "inf", "nan", "-nan"),
    *("1e308", "1e-320", "2024-01-01", "07:32:00", "1979-05-27T07:32:00Z", "0x7fffffffffffffff"),
    *("9223372036854775808", "9" * 30, "9" * 310, "9" * 5000, "0x" + "f" * 5000, "1_000"),
    *("[]", "[1]", '["a"]', "[[[]]]", "{}", "{a = 1}", "{a.b.c = [{}]}", '"\\u0000"', '"\\q"'),
    *("[" * 900 + "]" * 900, "[" * 100 + "]" * 100, "{a=" * 500 + "1" + "}" * 500, "["),
    *('"' + "a" * 10**4 + '"', '"~nobody/x"', '"[0]*3+[1]*9"', '"' + "(" * 1000 + '"', "?", ""),
]
_TOML_KEYS = [
    *("x", "a" * 10**4, ".".join("a" * 200), '"\\u0000"', "model", "lr", "tp", "''", "é", "[x]"),
    *("[[model]]", "[" + ".".join("a" * 1100) + "]", "[model.num_layers]", "[training]"),
]


def _mutated_toml(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        key, _, value = lines[at].partition(" = ")
        kind = chance.randrange(7)
        if kind == 0:
            del lines[at : at + 1 + chance.randrange(3)]
            lines = lines or [""]
        elif kind == 1:
            lines.insert(at, chance.choice(lines))
        elif kind == 2:
            lines[at] = f"{chance.choice(_TOML_KEYS)} = {value or 1}"
        elif kind == 3:
            lines[at] = f"{key}.{chance.choice(_TOML_KEYS)} = {value or 1}"
        elif kind == 4:
            lines.insert(at, chance.choice(_TOML_KEYS))
        else:
            lines[at] = f"{key} = {chance.choice(_TOML_VALUES)}"
    return "\n".join(lines)


_TOMLS = {
    **{path.stem: path.read_text(encoding="utf-8") for path in sorted(RECIPES.glob("*.toml"))},
    "config.toml of a dense model": to_toml(Config(PRESETS["debug-llama"])),
    "config.toml of a mixture": to_toml(Config(PRESETS["deepseek-v3"])),
}


@pytest.mark.slow
@TIMES
@pytest.mark.parametrize("name", _TOMLS)
def test_mutated_toml_is_answered(name: str, times: int, tmp_path: Path) -> None:
    chance = random.Random(name)
    file = tmp_path / "mine.toml"
    read = 0
    for turn in range(times // (2 * len(_TOMLS)) + 1):
        if turn % 4 == 0:
            file.write_bytes(_mutated_bytes(_TOMLS[name].encode(), chance))
        else:
            file.write_text(_mutated_toml(_TOMLS[name], chance), encoding="utf-8")
        read += _is_read(lambda: read_config(file))
    assert read


@pytest.mark.parametrize(
    "name",
    ["a" * 10**4, "a" * 10**4 + ".toml", "~nobody-of-this-name/x.toml", "\0.toml", "\0/x.toml"],
)
def test_names_that_are_no_path_are_answered(name: str) -> None:
    assert not _is_read(lambda: read_config(name))
    assert not _is_read(lambda: read_config(model=name))
