"""Parses Megatron-LM's moe_layer_freq, which says which layers have experts."""

import ast
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from fivefold.errors import ConfigError, Mistake

# Stages list their layers, so a slip of the keyboard must not ask for a billion.
MAX_LAYERS = 100_000


@lru_cache(maxsize=256)
def expert_layers(freq: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts.

    Args:
        freq: whole number N (layers 0, N, 2N, ... have experts), or list expression of 0 and 1 such
            as "[0]*3+[1]*58" or "([0]+[1]*3)*4", with one entry per layer.
        num_layers: number of layers of the model.

    Raises:
        ConfigError: `freq` is neither, or has a different number of entries.
    """
    try:
        value = _value(ast.parse(freq.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(
            num_layers, f"moe_layer_freq {freq!r} is neither a number nor a list"
        ) from error
    if isinstance(value, int):
        if value < 1:
            raise _wrong(num_layers, f"moe_layer_freq must be at least 1, not {value}")
        return tuple(layer % value == 0 for layer in range(num_layers))
    if len(value) != num_layers:
        sizes = f"{len(value)} entries, {num_layers} layers"
        raise _wrong(num_layers, f"moe_layer_freq {freq!r} does not have one entry a layer", sizes)
    if set(value) - {0, 1}:
        raise _wrong(num_layers, f"moe_layer_freq {freq!r} has entries other than 0 and 1")
    return tuple(map(bool, value))


def layer_frequency(has_experts: Sequence[bool]) -> str:
    """The inverse of `expert_layers`: "1" if all layers have experts, else a sum of runs.

    >>> layer_frequency([False, True, True])
    '[0]*1+[1]*2'
    """
    if all(has_experts):
        return "1"
    runs = ((int(experts), len(list(run))) for experts, run in groupby(has_experts))
    return "+".join(f"[{experts}]*{length}" for experts, length in runs)


def _value(node: ast.expr) -> int | list[int]:
    """The value of an expression of whole numbers, lists, + and *; ValueError for others."""
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


def _wrong(num_layers: int, what: str, *why: str) -> ConfigError:
    words = ["1", f"[0]*1+[1]*{num_layers - 1}"][: min(num_layers, 2)]
    return ConfigError(Mistake(what, why, tuple(f"--moe-layer-freq {word}" for word in words)))
