"""Multimodal models, of which only the text model is read: its fields, and the names of its
tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.families.qwen import QWEN3_VL_MOE
from fivefold.config.huggingface.family import Tensors
from fivefold.config.huggingface.generic import read_generic, read_stored_weights
from fivefold.config.huggingface.reader import Reader
from fivefold.errors import ConfigError
from fivefold.files import read_json

Fields = Mapping[str, Any]


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        **more,
    }


@dataclass(frozen=True)
class _TextModel:
    """A text model within a multimodal one.

    Attributes:
        family: the family that computes the same from text alone.
        defaults: what transformers takes an absent field for, which published files leave out.
        sections: whether it has a position for time, height and width each, which are the same in
            text.
        tensors: how its tensors are stored, if not as those of the family.
    """

    family: str
    defaults: Fields
    sections: bool = False
    tensors: Tensors | None = None


_QWEN2_VL = _sizes(
    *(152064, 8192, 29568, 80, 64, 32768),
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_window_layers=80,
    rope_theta=1e6,
)
_QWEN3_VL_MOE = _sizes(
    *(151936, 2048, 5632, 24, 16, 128000),
    num_key_value_heads=16,
    moe_intermediate_size=1408,
    norm_topk_prob=True,
    num_experts_per_tok=4,
    rope_theta=500000.0,
)
_LATENTS = {
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK3 = _TextModel("deepseek_v3", _sizes(129280, 7168, 18432, 61, 128, 4096, **_LATENTS))
_MISTRAL4 = _LATENTS | {
    "kv_lora_rank": 256,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "qk_nope_head_dim": 64,
}
_EXAONE4 = _TextModel("exaone4", _sizes(102400, 4096, 16384, 32, 32, 2048))
TEXTS: Mapping[str, _TextModel] = MappingProxyType(
    {
        "deepseek_v3": _DEEPSEEK3,
        "kimi_k2": _DEEPSEEK3,
        "exaone4": _EXAONE4,
        "exaone4_5_text": _EXAONE4,
        "gemma3_text": _TextModel("gemma3_text", _sizes(262208, 2304, 9216, 26, 8, 131072)),
        "gemma4_text": _TextModel(
            "gemma4_text", _sizes(262144, 2304, 9216, 30, 8, 131072, num_key_value_heads=4)
        ),
        "gemma4_unified_text": _TextModel(
            "gemma4_unified_text", _sizes(262144, 2304, 9216, 30, 8, 262144, num_key_value_heads=4)
        ),
        "llama": _TextModel("llama", _sizes(32000, 4096, 11008, 32, 32, 2048)),
        "llama4_text": _TextModel("llama4_text", _sizes(202048, 5120, 8192, 48, 40, 131072)),
        "mistral": _TextModel("mistral", _sizes(32000, 4096, 14336, 32, 32, 131072)),
        "ministral3": _TextModel("ministral3", _sizes(131072, 4096, 14336, 34, 32, 262144)),
        "mistral4": _TextModel(
            "mistral4", _sizes(131072, 4096, 12288, 36, 32, 1048576, **_MISTRAL4)
        ),
        "qwen2": _TextModel("qwen2", _sizes(151936, 4096, 22016, 32, 32, 32768)),
        "qwen3": _TextModel("qwen3", _sizes(151936, 4096, 22016, 32, 32, 32768)),
        "qwen2_vl_text": _TextModel("qwen2", _QWEN2_VL, sections=True),
        "qwen2_5_vl_text": _TextModel("qwen2", _QWEN2_VL, sections=True),
        "qwen3_vl_text": _TextModel(
            "qwen3", _sizes(151936, 4096, 22016, 32, 32, 128000, rope_theta=500000.0), sections=True
        ),
        "qwen3_5_text": _TextModel(
            "qwen3_5_text", _sizes(248320, 4096, 12288, 32, 16, 32768), sections=True
        ),
        "qwen3_5_moe_text": _TextModel(
            "qwen3_5_moe_text", _sizes(248320, 2048, 512, 40, 16, 32768), sections=True
        ),
        "qwen3_vl_moe_text": _TextModel(
            "qwen3_moe", _QWEN3_VL_MOE, sections=True, tensors=QWEN3_VL_MOE
        ),
    }
)
"""By their `model_type`."""


@dataclass(frozen=True)
class _Multimodal:
    """How a multimodal family describes its text model.

    Attributes:
        texts: the `model_type`s of text models that it may have; the first, if the file says none.
        unused: fields without effect on text.
        tied: whether head and embedding are one if the file does not say.
        tied_by: which file's field says so to transformers 5: the whole model's; or the text
            model's, too, where that one is false; or the text model's alone.
        flat: whether it was published with the text model's fields among the others.
        code: whether it was published with code of its own before transformers had it.
    """

    texts: tuple[str, ...]
    unused: tuple[str, ...]
    tied: bool = False
    tied_by: Literal["whole", "either", "text"] = "whole"
    flat: bool = False
    code: bool = False


_ANY_TEXT = "llama", "mistral", "qwen2", "qwen3"
_PROJECTOR = ("image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer")
_LLAVA = (
    *_PROJECTOR,
    *("vision_feature_select_strategy", "multimodal_projector_bias", "image_seq_length"),
    "ignore_index",
)
_LLAVA_NEXT = (*_LLAVA, "image_grid_pinpoints", "use_image_newline_parameter")
_IDEFICS = "image_token_id", "scale_factor", "_pad_token_id"
_QWEN_VL = (
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "vision_token_id",
)
_GEMMA4 = (
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id"),
    *("eoa_token_index", "eoa_token_id", "audio_token_id", "initializer_range"),
    *("vision_soft_tokens_per_image", "audio_config"),
)
MULTIMODAL: Mapping[str, _Multimodal] = MappingProxyType(
    {
        "gemma3": _Multimodal(
            ("gemma3_text",),
            (
                *("mm_tokens_per_image", "image_token_index", "image_token_id"),
                *("boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"),
                "initializer_range",
            ),
            tied=True,
        ),
        "gemma4": _Multimodal(("gemma4_text",), _GEMMA4, tied=True),
        "gemma4_unified": _Multimodal(("gemma4_unified_text",), _GEMMA4, tied=True),
        "idefics3": _Multimodal(("llama",), _IDEFICS),
        "smolvlm": _Multimodal(("llama",), _IDEFICS),
        "llama4": _Multimodal(
            ("llama4_text",),
            (
                *("image_token_index", "image_token_id"),
                *("boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"),
            ),
            tied_by="text",
        ),
        "mistral3": _Multimodal(
            ("mistral", "ministral3", "mistral4"),
            (*_PROJECTOR, "multimodal_projector_bias", "spatial_merge_size"),
        ),
        "llava": _Multimodal(_ANY_TEXT, _LLAVA, tied_by="either"),
        "llava_next": _Multimodal(_ANY_TEXT, _LLAVA_NEXT),
        "llava_onevision": _Multimodal(
            ("qwen2", "llama", "mistral", "qwen3"),
            (*_LLAVA_NEXT, "video_token_index", "video_token_id", "vision_aspect_ratio"),
            tied_by="either",
        ),
        "internvl": _Multimodal(
            ("qwen2", "llama", "mistral", "qwen3"),
            (
                *_PROJECTOR,
                *("image_seq_length", "downsample_ratio", "vision_feature_select_strategy"),
            ),
        ),
        "exaone4_5": _Multimodal(
            ("exaone4", "exaone4_5_text"), ("image_token_id", "video_token_id")
        ),
        "kimi_k25": _Multimodal(
            ("deepseek_v3", "kimi_k2"),
            (
                *("image_token_id", "video_token_id", "vision_start_token_id"),
                *("vision_end_token_id", "projection_hidden_size", "projection_layer_norm_eps"),
                *("media_placeholder_token_id", "ignore_index", "use_unified_vision_chunk"),
                "video_placeholder",
            ),
            tied=True,
            code=True,
        ),
        "qwen2_vl": _Multimodal(("qwen2_vl_text",), _QWEN_VL, tied_by="either", flat=True),
        "qwen2_5_vl": _Multimodal(("qwen2_5_vl_text",), _QWEN_VL, tied_by="either", flat=True),
        "qwen3_vl": _Multimodal(("qwen3_vl_text",), _QWEN_VL),
        "qwen3_vl_moe": _Multimodal(("qwen3_vl_moe_text",), _QWEN_VL),
        "qwen3_5": _Multimodal(("qwen3_5_text",), (*_QWEN_VL, "language_model_only")),
        "qwen3_5_moe": _Multimodal(("qwen3_5_moe_text",), (*_QWEN_VL, "language_model_only")),
    }
)


def is_multimodal(fields: Fields) -> bool:
    """Whether a config.json is that of a multimodal model whose text model can be read."""
    return _kind(fields) in MULTIMODAL


def _kind(fields: Fields) -> str | None:
    kind = fields.get("model_type")
    return kind if isinstance(kind, str) else None


def text_kind(fields: Fields) -> str | None:
    """The family of the text model; of a text-only file, its own."""
    named = _text_type(fields)
    return _kind(fields) if named is None else TEXTS[named].family


def tensors_of(fields: Fields) -> Tensors:
    """How files hold the tensors of a text model, within a multimodal model or on its own."""
    named = _text_type(fields)
    if named is not None and (own := TEXTS[named].tensors) is not None:
        return own
    family = FAMILIES.get(text_kind(fields) or "")
    return Tensors() if family is None else family.tensors


def _text_type(fields: Fields) -> str | None:
    """The `model_type` of the text model; None: it is no multimodal file."""
    kind = _kind(fields)
    if kind is None or kind not in MULTIMODAL:
        return None
    texts, table = MULTIMODAL[kind].texts, fields.get("text_config")
    named = _kind(table) if isinstance(table, Mapping) else None
    return named if named in texts else texts[0]


def text_reader(fields: Fields) -> tuple[Reader, str]:
    """A reader of the text model's fields, as its family has them, and that family.

    The rest of the file has been read by then, and its mistakes are among the reader's.
    """
    kind = _kind(fields)
    assert kind is not None
    family, texts = MULTIMODAL[kind], MULTIMODAL[kind].texts
    whole = Reader(fields, f"this {kind} model")
    read_generic(whole)
    read_stored_weights(whole, code=family.code)
    whole.without_effect("model_type", "vision_config", *family.unused)
    table, place = whole.table("text_config"), "text_config."
    if table is None:
        unused = {"model_type", "vision_config", "text_config", *family.unused}
        flat = {name: value for name, value in fields.items() if name not in unused}
        if not family.flat:
            whole.mistakes.add("config.json needs an object for 'text_config'")
        table, place = Reader(flat, f"this {kind} model"), ""
        tied = whole.flag("tie_word_embeddings", family.tied)
    else:
        tied = _tied(whole, table, kind)
        _read_copies(whole, table, kind)
        whole.refuse_unread()
    named = table.text("model_type", default=texts[0], choices=texts) or texts[0]
    text = dict(table.fields) | {"tie_word_embeddings": tied}
    if TEXTS[named].sections:
        text = {name: _without_sections(value) for name, value in text.items()}
    ropes = [text.get(name) for name in ("rope_scaling", "rope_parameters")]
    known = [name for rope in ropes if isinstance(rope, Mapping) for name in rope]
    defaults = {name: value for name, value in TEXTS[named].defaults.items() if name not in known}
    if named == "qwen3_vl_moe_text" and not {"num_experts", "num_local_experts"} & text.keys():
        defaults["num_experts"] = 60
    reader = Reader(defaults | text, f"this {kind} model", place)
    reader.mistakes = whole.mistakes
    _read_text_fields(reader, kind, named)
    return reader, TEXTS[named].family


def _read_copies(whole: Reader, table: Reader, kind: str) -> None:
    """Read what a file has beside its text_config, too: the size of the vocabulary; all, as
    versions of transformers between 4 and 5 wrote it of Qwen's."""
    names = {"vocab_size", *(table.fields if MULTIMODAL[kind].flat else ())} & {*whole.fields}
    for name in names - {"model_type", "tie_word_embeddings"}:
        one, other = (_without_sections(of.fields.get(name)) for of in (whole, table))
        whole.without_effect(name)
        if name in table.fields and one != other:
            whole.contradict({name: whole.fields[name], f"text_config.{name}": table.fields[name]})


def _tied(whole: Reader, table: Reader, kind: str) -> bool:
    """Whether head and embedding are tied: transformers 5 asks the whole model, 4 its text
    model."""
    family = MULTIMODAL[kind]
    text = table.flag("tie_word_embeddings", family.tied)
    tied = whole.flag("tie_word_embeddings", text)
    return {"whole": tied, "either": tied or text, "text": text}[family.tied_by]


def _without_sections(value: Any) -> Any:
    """A RoPE table without the features for time, height and width; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    kept = {
        name: "default" if each == "mrope" else each
        for name, each in value.items()
        if name not in ("mrope_section", "mrope_interleaved")
    }
    if "type" in kept and kept["type"] == kept.get("rope_type", kept["type"]):
        kept["rope_type"] = kept.pop("type")
    return kept


def _read_text_fields(reader: Reader, kind: str, named: str) -> None:
    """Refuse fields that the text model of a multimodal one ignores, but its family does not."""
    if kind == "gemma3":
        reader.fixed(
            "final_logit_softcapping", None, why="transformers caps logits of the text model alone"
        )
    if kind in ("idefics3", "smolvlm"):  # of published files, and transformers has no use for them
        reader.without_effect("perceiver_config", "pixel_shuffle_factor", "neftune_noise_alpha")
        reader.without_effect("_flash_attn_2_enabled")
        for name in ("qk_layer_norms", "use_resampler"):
            reader.fixed(name, False)
    if named in ("qwen3_vl_text", "qwen3_vl_moe_text"):
        reader.fixed("use_sliding_window", False)
    if named == "qwen3_vl_moe_text":
        reader.fixed("norm_topk_prob", True, why="transformers normalises them in any case")
    if named in ("qwen2_vl_text", "qwen2_5_vl_text"):
        sizes = (reader.fields.get(name) for name in ("hidden_size", "num_attention_heads"))
        hidden, heads = (size if type(size) is int and size > 0 else 1 for size in sizes)
        reader.fixed("head_dim", hidden // heads, None)


def text_model_note(path: Path) -> str | None:
    """A note about the parts of a model at a path that are not read; None if there are none."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return None
    fields = read_json(file, dict[str, Any], ConfigError)
    if not is_multimodal(fields):
        return None
    return (
        f"{path} is a {_kind(fields)} model, of which the text model ({text_kind(fields)}) is read"
    )


_TEXT_NAMES = (
    ("language_model.model.blocks.", "model.layers."),  # as transformers 5 writes Kimi K2.5's
    ("language_model.model.", "model."),  # as transformers 4 writes them until 4.52
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),  # of Idefics3 and SmolVLM
    ("language_model.", "model."),  # of the model without a head
)
_PARTS = (
    *("embed_vision", "embed_audio", "vision_embedder", "audio_tower"),
    *("vision_tower", "vision_model", "multi_modal_projector", "visual", "image_newline"),
    *("connector", "mm_projector"),
)
"""Parts beside the text model, by the names of their tensors."""


def text_name(name: str) -> str:
    """The name that the text model has for a tensor of the multimodal one."""
    for theirs, ours in _TEXT_NAMES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def part_of(name: str) -> str | None:
    """The part besides the text model that a tensor belongs to; None: no known one."""
    part = name.removeprefix("model.").partition(".")[0]
    return part if part in _PARTS else None
