"""Rotary positions: rope_theta and rope_scaling of transformers 4, rope_parameters of 5."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope_scalings import (
    alpha,
    dynamic,
    longest,
    longrope,
    proportional,
    temperature,
    tempered,
    yarn,
    yarn_settings,
)

LLAMA3: Mapping[str, str] = MappingProxyType(
    {
        "rope_scaling_factor": "factor",
        "rope_low_freq_factor": "low_freq_factor",
        "rope_high_freq_factor": "high_freq_factor",
        "rope_original_max_position_embeddings": "original_max_position_embeddings",
    }
)
"""ModelConfig's names of the settings of Llama 3's scaling, and those of a config.json."""
SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
"""Kinds of scaling that a ModelConfig expresses."""
PHI3 = ("default", "longrope", "su", "yarn")
"""Kinds in Phi-3's files, of which all but the first are names of LongRoPE."""


@dataclass(frozen=True)
class Rope:
    """The rotary positions of a model.

    Attributes:
        theta: base of RoPE.
        share: share of a head's features that is rotated.
        kind: kind of scaling; "default": none.
        scaling: ModelConfig settings for the scaling.
    """

    theta: float
    share: float
    kind: str
    scaling: tuple[tuple[str, Any], ...] = ()

    def settings(self) -> dict[str, Any]:
        """ModelConfig settings for these positions."""
        return {"rotary_base": self.theta, "rotary_percent": self.share, **dict(self.scaling)}


def whole_head_rope(reader: Reader, default: Rope, *, scalings: tuple[str, ...] = SCALINGS) -> Rope:
    """Rotary positions of whole heads, limited to what a ModelConfig can express."""
    return _of_whole_heads(reader, read_rope(reader, default, scalings=scalings))


def raised_rope(reader: Reader, default: Rope, head_dim: int) -> Rope:
    """Hunyuan's, whose "dynamic" scaling raises the base by a fixed alpha, at any length."""
    rope = read_rope(reader, default, raised=True)
    alpha = dict(rope.scaling).get("alpha")
    if alpha is not None:
        power = head_dim / max(head_dim - 2, 1)
        rope = Rope(rope.theta * alpha**power, rope.share, "default")
    return _of_whole_heads(reader, rope)


def sharpened_rope(
    reader: Reader,
    default: Rope,
    *,
    factor: float = 16.0,
    original: int = 16384,
    latents: bool = False,
) -> Rope:
    """Ministral 3's YaRN, whose table also says how attention is sharpened with the position.

    Args:
        reader: reader of the file.
        default: the family's default, whose share no file may change.
        factor: the family's default of the scaling factor.
        original: that of the sequence length before scaling, in tokens.
        latents: whether YaRN also scales the scores, as in latent attention.
    """
    if reader.fields.get("rope_parameters") == {}:
        why = "transformers cannot run the model without llama_4_scaling_beta in it"
        reader.unsupported("rope_parameters", {}, [None], why)
    scales = (1.0, 1.0) if latents else (0.0, 0.0)
    usual = yarn_settings(factor, original, whole_pairs=True, scales=scales)
    default = Rope(default.theta, default.share, "yarn", usual + tempered(0.1, original))
    rope = read_rope(reader, default, scalings=("yarn",), latents=latents, sharpened=True)
    return _of_whole_heads(reader, rope, default.share)


def _of_whole_heads(reader: Reader, rope: Rope, share: float = 1.0) -> Rope:
    """Positions of all features that may be turned: a share of each head in latent attention."""
    if rope.share != share:
        reader.unsupported("partial_rotary_factor", rope.share, [share])
    return replace(rope, share=1.0)


def read_rope(
    reader: Reader,
    default: Rope,
    *,
    theta: str = "rope_theta",
    share: str = "partial_rotary_factor",
    scalings: tuple[str, ...] = SCALINGS,
    raised: bool = False,
    latents: bool = False,
    original: int | None = None,
    sharpened: bool = False,
    ignored: tuple[str, ...] = (),
) -> Rope:
    """The rotary positions that a config.json describes.

    transformers 5 prefers `rope_scaling` to `rope_parameters`, and fields in either to those
    outside; transformers 4 differs. So everything given must agree.

    Args:
        reader: reader of the file.
        default: the family's default.
        theta: name of theta outside the tables.
        share: name of the share outside the tables.
        scalings: kinds of scaling that the family has and a ModelConfig expresses.
        raised: whether "dynamic" raises the base by Hunyuan's alpha, at any length.
        latents: whether YaRN also scales the scores, as in latent attention.
        original: Phi-3's sequence length before scaling, which it has beside the table; None: it is
            in the table, as in other families.
        sharpened: whether the table says how attention gets hotter with the position.
        ignored: fields of the table that say nothing of text.
    """
    beside = {name: reader.optional_number(name) for name in (theta, share)}
    found: dict[str, Rope] = {}
    for name in ("rope_parameters", "rope_scaling"):
        table = reader.table(name)
        if table is not None:
            table.without_effect(*ignored)
            found[name] = Rope(
                _agreed(table, "rope_theta", theta, beside[theta], default.theta),
                _agreed(table, "partial_rotary_factor", share, beside[share], default.share),
                *_scaling(table, scalings, raised, latents, reader, original, sharpened),
            )
    untabled = Rope(
        _or_default(beside[theta], default.theta),
        _or_default(beside[share], default.share),
        default.kind,
        default.scaling,
    )
    rope = next(iter(found.values()), untabled)
    if any(other != rope for other in found.values()):
        reader.contradict({name: reader.fields[name] for name in found})
    return rope


def rope_by_layer(
    reader: Reader,
    default: Rope,
    base: float,
    *,
    local: str | None = None,
    scalings: tuple[str, ...] = SCALINGS,
    share: float | None = None,
) -> tuple[Rope, float]:
    """RoPE of layers without a window, and the base of those with one, which is not scaled.

    transformers 4 has them in fields of their own, 5 in a table for each type of layer.

    Args:
        reader: reader of the file.
        default: the family's default.
        base: the family's base of layers with a window.
        local: name of that base outside the tables; None: the family has no such field.
        scalings: kinds of scaling that the family has and a ModelConfig expresses.
        share: share of a head that is rotated where a table does not say which; None: tables may
            not say it, and all is rotated.
    """
    beside = reader.optional_number("rope_theta")
    beside_local = None if local is None else reader.optional_number(local)
    theta, tables = _or_default(beside, default.theta), reader.table("rope_parameters")
    scaling = reader.table("rope_scaling")
    if tables is not None and scaling is not None:
        names = "rope_parameters", "rope_scaling"
        reader.contradict({name: reader.fields[name] for name in names})
    if tables is None:
        base = _or_default(beside_local, base)
        if scaling is None:
            return Rope(theta, 1.0, default.kind, default.scaling), base
        if "rope_type" not in scaling.fields:
            scaling.fixed(
                "type", None, why="transformers 5 reads rope_type, and leaves it unscaled"
            )
        theta = _agreed(scaling, "rope_theta", "rope_theta", beside, default.theta)
        return Rope(theta, 1.0, *_scaling(scaling, SCALINGS, False, False, reader)), base
    whole, window = tables.table("full_attention"), tables.table("sliding_attention")
    tables.refuse_unread()
    part = 1.0 if share is None else share
    rope = Rope(theta, part, "default")
    if whole is not None:
        theta = _agreed(whole, "rope_theta", "rope_theta", beside, default.theta)
        part = part if share is None else whole.number("partial_rotary_factor", share)
        rope = Rope(theta, part, *_scaling(whole, scalings, False, False, reader))
    if window is not None:
        other = part if share is None else window.number("partial_rotary_factor", share)
        if other != part and whole is not None:
            why = "that of layers without a window has to be the same"
            window.unsupported("partial_rotary_factor", other, [part], why)
        rope = replace(rope, share=other)
        window.text("rope_type", "type", default="default", choices=("default",))
        base = _agreed(window, "rope_theta", local or "rope_theta", beside_local, base)
        window.refuse_unread()
    return rope, base


def _agreed(table: Reader, name: str, outer: str, beside: float | None, default: float) -> float:
    """A number that a table and the field outside it must agree on."""
    inside = table.optional_number(name)
    if inside is not None and beside is not None and inside != beside:
        table.contradict({name: inside, f"{outer} beside it": beside})
    return _or_default(inside, _or_default(beside, default))


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _scaling(
    table: Reader,
    scalings: tuple[str, ...],
    raised: bool,
    latents: bool,
    whole: Reader,
    beside: int | None = None,
    sharpened: bool = False,
) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The kind of scaling and its settings."""
    by_layer = [name for name, value in table.fields.items() if isinstance(value, Mapping)]
    if by_layer:
        table.unsupported("parameters by layer type", sorted(by_layer), ["the same for all layers"])
        return "default", ()
    names = ["rope_type", "type"]
    if beside is not None and all(table.fields.get(name) in PHI3[1:] for name in names):
        table.without_effect(names.pop())  # transformers 5 adds the other to what a file had
    kind = table.text(*names, default="default", choices=scalings)
    if kind is None:
        return "default", ()
    if beside is not None and kind in PHI3[1:]:
        kind = "longrope"
    scaling: tuple[tuple[str, Any], ...] = ()
    if kind == "proportional":
        scaling = proportional(table)
    if kind == "dynamic":
        table.without_effect("original_max_position_embeddings")
        scaling = (("alpha", alpha(table)),) if raised else dynamic(table, whole)
    if kind in ("yarn", "deepseek_yarn"):
        kind, scaling = "yarn", yarn(table, latents, whole)
    if kind == "longrope":
        scaling = longrope(table, beside, longest(whole))
    if kind == "linear":
        if "factor" not in table.fields:
            table.mistakes.add('rope_type = "linear" needs factor, which positions are divided by')
        scaling = (("rotary_seq_len_interpolation_factor", table.number("factor", 1.0)),)
    if kind == "llama3":
        missing = [name for name in LLAMA3.values() if name not in table.fields]
        if missing:
            table.mistakes.add(f"llama3 RoPE scaling needs {', '.join(missing)}")
        *factors, original = LLAMA3.values()
        numbers = (table.number(name, 1.0) for name in factors)
        scaling = llama3_settings(*numbers, table.size(original, default=1))
    if sharpened:
        scaling += temperature(table)
    table.refuse_unread()
    return kind, scaling


def llama3_settings(*numbers: float) -> tuple[tuple[str, Any], ...]:
    """ModelConfig settings for Llama 3's scaling, by its numbers in the order of `LLAMA3`."""
    return ("use_rope_scaling", True), *zip(LLAMA3, numbers, strict=True)
