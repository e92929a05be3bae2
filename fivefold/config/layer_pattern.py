"""Parses patterns such as moe_layer_freq and window_attn_skip_freq, which say which layers have
something."""

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Literal, cast, get_args

from fivefold.config.settings import flag_of
from fivefold.errors import ConfigError, Mistake

# A limit, because stages list their layers: a typing error must not ask for a billion.
MAX_LAYERS = 100_000

Mixer = Literal["M", "*", "-", "E"]
"""What a layer of a hybrid model consists of: Mamba-2, attention, an MLP, or experts."""


_EVERY: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {
        "moe_layer_freq": lambda layer, number: layer % number == 0,
        "window_attn_skip_freq": lambda layer, number: (layer + 1) % number != 0,
        "linear_attention_freq": lambda layer, number: (layer + 1) % number != 0,
        "no_rope_freq": lambda layer, number: (layer + 1) % number == 0,
    }
)
"""Setting -> whether a layer has what it is about, where its value is a whole number: layers 0, N,
2N, ... have experts; all but N-1, 2N-1, ... a window, or linear attention; and these no RoPE."""


@lru_cache(maxsize=256)
def layers_of(name: str, freq: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has the feature of a setting: experts, a window, linear attention, no
    RoPE.

    Args:
        name: the setting, such as "moe_layer_freq".
        freq: its value: a whole number, or a list expression of 0 and 1 with one entry per layer,
            such as "[0]*3+[1]*58" or "([0]+[1]*3)*4".
        num_layers: number of layers of the model.

    Raises:
        ConfigError: `freq` is neither, or has a different number of entries.
    """
    value = _read(name, freq, num_layers)
    if isinstance(value, int):
        return tuple(_EVERY[name](layer, value) for layer in range(num_layers))
    return value


@lru_cache(maxsize=256)
def mixers(pattern: str, num_layers: int) -> tuple[Mixer, ...]:
    """The mixer of each layer of a hybrid model.

    Args:
        pattern: one letter for each layer, as Megatron-LM's --hybrid-override-pattern has it.
        num_layers: number of layers of the model.

    Raises:
        ConfigError: other letters, or another number of them.
    """
    name = "hybrid_override_pattern"
    found = letters(name, pattern)
    if len(pattern) != num_layers:
        sizes = f"{len(pattern)} letters, {num_layers} layers"
        works = (f"--num-layers {len(pattern)}",) if pattern else (f"{flag_of(name)} none",)
        raise ConfigError(Mistake(f"{name} does not have one letter a layer", (sizes,), works))
    return found


@lru_cache(maxsize=256)
def letters(name: str, pattern: str) -> tuple[Mixer, ...]:
    """The mixers of a pattern of any length, the value of the setting `name`.

    Raises:
        ConfigError: other letters.
    """
    if wrong := sorted({*pattern} - {*get_args(Mixer)}):
        why = "M is Mamba-2, * attention, - an MLP, E experts"
        what = f"{name} {pattern!r} has {', '.join(map(repr, wrong))}, which is no layer"
        raise ConfigError(Mistake(what, (why,), (f"{flag_of(name)} none",)))
    return cast(tuple[Mixer, ...], tuple(pattern))


def window_frequency(has_window: Sequence[bool]) -> str:
    """The value for layers with a window, or with linear attention: a number if possible, else a
    sum of runs.

    >>> window_frequency([True, False, True])
    '2'
    """
    for number in range(2, len(has_window) + 2):
        if layers_of("window_attn_skip_freq", str(number), len(has_window)) == tuple(has_window):
            return str(number)
    return runs(has_window)


def unrotated_frequency(unrotated: Sequence[bool]) -> str | None:
    """The value for layers without RoPE; None if all layers have it.

    >>> unrotated_frequency([False, True, False, False])
    '[0]*1+[1]*1+[0]*2'
    """
    if not any(unrotated):
        return None
    number = window_frequency([not without for without in unrotated])
    return number if number.isdigit() else runs(unrotated)


def _read(name: str, freq: str, num_layers: int) -> int | tuple[bool, ...]:
    """A positive number, or one entry per layer."""
    try:
        value = _value(ast.parse(freq.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(name, num_layers, f"{name} {freq!r} is neither a number nor a list") from error
    if isinstance(value, int):
        if value < 1:
            raise _wrong(name, num_layers, f"{name} must be at least 1, not {value}")
        return value
    if len(value) != num_layers:
        sizes = f"{len(value)} entries, {num_layers} layers"
        raise _wrong(name, num_layers, f"{name} {freq!r} does not have one entry a layer", sizes)
    if set(value) - {0, 1}:
        raise _wrong(name, num_layers, f"{name} {freq!r} has entries other than 0 and 1")
    return tuple(map(bool, value))


def layer_frequency(has_experts: Sequence[bool]) -> str:
    """The value for layers with experts: "1" if all have some, else a sum of runs.

    >>> layer_frequency([False, True, True])
    '[0]*1+[1]*2'
    """
    if all(has_experts):
        return "1"
    return runs(has_experts)


def runs(flags: Sequence[bool]) -> str:
    """A list expression with one entry per layer.

    >>> runs([False, False, True]), runs([True, False, True, False])
    ('[0]*2+[1]*1', '([1]*1+[0]*1)*2')
    """
    layers = len(flags)
    for period in range(2, layers // 2 + 1):
        times, rest = divmod(layers, period)
        if not rest and [*flags] == [*flags[:period]] * times and len({*flags}) > 1:
            return f"({_in_turn(flags[:period])})*{times}"
    return _in_turn(flags)


def _in_turn(flags: Sequence[bool]) -> str:
    counted = ((int(flag), len(list(run))) for flag, run in groupby(flags))
    return "+".join(f"[{flag}]*{length}" for flag, length in counted)


def _value(node: ast.expr) -> int | list[int]:
    """The value of an expression of whole numbers, lists, + and *; else ValueError."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=items):
            numbers = [_value(item) for item in items]
            if all(isinstance(number, int) for number in numbers):
                return numbers  # type: ignore[return-value]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int):
                if len(first) * second > MAX_LAYERS:
                    raise ValueError(f"more than {MAX_LAYERS} entries")
                return first * second
    raise ValueError(ast.unparse(node))


def _wrong(name: str, num_layers: int, what: str, *why: str) -> ConfigError:
    if num_layers == 1:
        without = "none --experimental-attention-variant none"
        one = {"moe_layer_freq": "1", "linear_attention_freq": without}
        words = [one.get(name, "none")]
    else:  # of windows and RoPE, 1 means no layer
        words = ["1" if name == "moe_layer_freq" else "2", f"[0]*1+[1]*{num_layers - 1}"]
    flag = flag_of(name)
    return ConfigError(Mistake(what, why, tuple(f"{flag} {word}" for word in words)))
