"""A table of rotary positions for each type of layer, as transformers 5 has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.config.huggingface.family import Fields
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import SCALINGS, Rope, rope_by_layer
from fivefold.config.model import ModelConfig


def rope_tables(
    reader: Reader,
    default: Rope,
    base: float,
    slides: Sequence[bool],
    *,
    scalings: tuple[str, ...] = SCALINGS,
    partial: bool = False,
) -> dict[str, Any]:
    """ModelConfig settings of families that transformers 4 lacked: they have whole tables or none,
    and no fields beside them.

    Args:
        reader: reader of the file.
        default: the family's default.
        base: the family's base of layers with a window.
        slides: whether each layer has one.
        scalings: kinds of scaling that the family has and a ModelConfig expresses.
        partial: whether tables may say which share of a head is rotated.
    """
    why = "transformers reads the tables in rope_parameters alone"
    reader.without_effect("rope_scaling")
    if "rope_scaling" in reader.fields:  # null takes the tables away, too
        value = reader.fields["rope_scaling"]
        reader.unsupported("rope_scaling", value, [], f"{why}; take it out")
    rope = default
    if reader.fields.get("rope_parameters") is None:
        reader.without_effect("rope_parameters")
    elif _are_whole(reader, default, slides):
        share = default.share if partial else None
        rope, base = rope_by_layer(reader, default, base, scalings=scalings, share=share)
    for name, value in {"rope_theta": rope.theta, "partial_rotary_factor": rope.share}.items():
        reader.fixed(name, None, value, why=why)
    other = any(slides) and (rope.scaling or base != rope.theta)
    return rope.settings() | {"rotary_base_local": base if other else None}


def _are_whole(reader: Reader, default: Rope, slides: Sequence[bool]) -> bool:
    """Whether each type of layer has its table without relying on a default; if not, that is a
    mistake."""
    tables = reader.table("rope_parameters")
    given: Mapping[str, Any] = {} if tables is None else tables.fields
    for kind in sorted({"sliding_attention" if slide else "full_attention" for slide in slides}):
        table = given.get(kind)
        if not isinstance(table, Mapping) or not {"rope_type", "rope_theta"} <= {*table}:
            whole = {kind: {"rope_type": "default", "rope_theta": default.theta}}
            why = "each type of layer needs a table, with rope_type and rope_theta"
            reader.unsupported("rope_parameters", given, [{**given, **whole}], why)
            return False
    return True


def written_tables(model: ModelConfig, fields: Fields) -> Fields:
    """Fields with such tables, instead of rope_theta and rope_scaling."""
    scaling = fields.pop("rope_scaling", {"rope_type": "default"})
    base = fields.pop("rope_theta")
    local = model.rotary_base_local or base
    tables = {
        "full_attention": scaling | {"rope_theta": base},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return fields | {"rope_parameters": tables}
