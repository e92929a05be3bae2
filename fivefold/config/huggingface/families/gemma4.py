"""Gemma 4: layers without a window have larger heads, and fewer keys, which may be values, too; and
in 26B-A4B experts beside the MLP, which here is a shared one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import AFTER, TOGETHER, Family, Fields, Tensors
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope
from fivefold.config.huggingface.rope_scalings import proportional_settings
from fivefold.config.huggingface.rope_tables import rope_tables, written_tables
from fivefold.config.huggingface.unsupported import GEMMA4_LAYER_EMBEDDINGS, GEMMA4_SHARED_KV
from fivefold.config.model import ModelConfig

_GEMMA4 = LlamaLike(
    num_key_value_heads=4,
    head_dim=256,
    tied=True,
    activation="gelu_pytorch_tanh",
    hidden_act="hidden_activation",
    norms="both",
    heads="per_head",
    null_key_value_heads=False,
    windows=None,
    rope=None,
    padded=True,
)
_ROPE = Rope(1000000.0, 1.0, "proportional", proportional_settings(0.25))
_EVERY = 6
"""Of so many layers the last has no window, unless the file lists them."""


@dataclass(frozen=True)
class _Absent:
    """What a family has, and takes absent fields for.

    Attributes:
        window: `sliding_window`.
        more: whether there may be experts, and embeddings for each layer.
    """

    window: int = 512
    more: bool = True


_UNIFIED = _Absent(window=1024, more=False)


def _gemma4(reader: Reader, kind: _Absent = _Absent()) -> ModelConfig:
    model = _GEMMA4.read(reader)
    # Of the second, "vision" is of images alone.
    reader.without_effect("use_double_wide_mlp", "hidden_act", "cache_implementation")
    reader.fixed("use_bidirectional_attention", None, "vision")
    reader.fixed("num_kv_shared_layers", 0, why=GEMMA4_SHARED_KV)
    if kind.more:
        model = _with_more(reader, model)
    *listed, _ = windows.listed(reader, model.num_layers) or (
        (layer + 1) % _EVERY != 0 for layer in range(model.num_layers)
    )
    slides = (*listed, False)  # transformers takes the window of the last layer away
    width = reader.size("sliding_window", default=kind.window, least=2)
    return replace(
        model,
        softmax_scale=1.0,
        embedding_multiplier=model.hidden_size**0.5,
        final_logit_softcapping=reader.number_or_null("final_logit_softcapping", None),
        v_l2_norm=True,
        layer_scalar=1.0,
        **rope_tables(reader, _ROPE, 10000.0, slides, scalings=("default", "proportional")),
        **windows.settings(width, slides),
        **_sizes(reader, model, slides),
    )


def _with_more(reader: Reader, model: ModelConfig) -> ModelConfig:
    """Of the other sizes, the experts of 26B-A4B; what E2B and E4B have is refused."""
    reader.without_effect("vocab_size_per_layer_input", "hidden_size_per_layer_input")
    embedded = reader.fields.get("hidden_size_per_layer_input", 256)
    if embedded != 0:
        reader.unsupported("hidden_size_per_layer_input", embedded, [0], GEMMA4_LAYER_EMBEDDINGS)
    if not reader.flag("enable_moe_block", False):
        reader.without_effect("num_experts", "top_k_experts", "moe_intermediate_size")
        return model
    return replace(
        model,
        moe_shared_expert_intermediate_size=model.ffn_size,
        num_experts=reader.size("num_experts"),
        moe_router_topk=reader.size("top_k_experts"),
        moe_ffn_hidden_size=reader.size("moe_intermediate_size"),
        moe_branch_norms=True,
    )


def _sizes(reader: Reader, model: ModelConfig, slides: Sequence[bool]) -> dict[str, Any]:
    """ModelConfig settings of attention in layers without a window, and in those with one."""
    shared = reader.flag("attention_k_eq_v", False)
    head = reader.size("global_head_dim", default=512)
    groups = reader.optional_size("num_global_key_value_heads", default=None)
    whole = {"head_dim": head, "num_key_value_heads": groups if shared else None}
    whole = _listed(reader, slides, whole)
    head, groups = whole["head_dim"] or model.head_dim, whole["num_key_value_heads"]
    sizes: dict[str, Any] = {
        "kv_channels": head,
        "num_query_groups": groups or model.num_kv_heads,
        "keys_as_values": shared,
    }
    if any(slides):
        local = {"kv_channels": model.head_dim, "num_query_groups": model.num_kv_heads}
        other = {f"{name}_local": size for name, size in local.items() if size != sizes[name]}
        sizes |= other
    return sizes


def _listed(
    reader: Reader, slides: Sequence[bool], whole: dict[str, int | None]
) -> dict[str, int | None]:
    """Sizes of layers without a window: as transformers 5 writes them, of each layer, if it has."""
    table, name = reader.table("per_layer_config"), "per_layer_config"
    if name not in reader.fields:
        return whole
    given = {} if table is None else table.fields
    numbers = [layer for layer, slide in enumerate(slides) if not slide]
    first, *others = given.values() if given else [None]
    listed = sorted(int(layer) for layer in given if layer.isdecimal())
    if (
        table is None
        or listed != numbers
        or len(given) != len(numbers)
        or others != [first] * (len(others))
    ):
        why = "layers without a window have sizes of their own, all the same"
        works = {str(layer): {n: size for n, size in whole.items() if size} for layer in numbers}
        reader.unsupported(name, given, [works], why)
        return whole
    of_one = table.table(next(iter(given)))
    found = dict.fromkeys(whole)
    if of_one is not None:
        found = {n: of_one.optional_size(n, default=None) for n in whole}
        of_one.refuse_unread()
    reader.fixed("global_head_dim", None, found["head_dim"], why=f"{name} is what counts")
    return found


def _write(model: ModelConfig, kind: _Absent = _Absent()) -> Fields:
    local = model.attention_of(True)
    fields = _GEMMA4.write(model) | windows.fields(model)
    fields["hidden_activation"] = fields.pop("hidden_act")
    if fields["sliding_window"] is None:
        del fields["sliding_window"]
    shared = model.keys_as_values
    if kind.more:
        fields |= {"hidden_size_per_layer_input": 0} | _written_experts(model)
    if not shared and model.num_kv_heads != local.num_kv_heads:  # which no other field can say
        sizes = {"head_dim": model.head_dim, "num_key_value_heads": model.num_kv_heads}
        whole = (n for n in range(model.num_layers) if model.window_of(n) is None)
        fields["per_layer_config"] = {str(layer): sizes for layer in whole}
    return written_tables(model, fields) | {
        "final_logit_softcapping": model.final_logit_softcapping,
        "attention_k_eq_v": shared,
        "head_dim": local.head_dim,
        "num_key_value_heads": local.num_kv_heads,
        "global_head_dim": model.head_dim,
        "num_global_key_value_heads": model.num_kv_heads if shared else None,
    }


def _written_experts(model: ModelConfig) -> Fields:
    if model.num_experts is None:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": model.num_experts,
        "top_k_experts": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "intermediate_size": model.shared_ffn_size,
    }


_BEFORE = {".post_attention_layernorm.": ".pre_feedforward_layernorm."}
_DENSE = Tensors({**_BEFORE, **AFTER})
_TENSORS = Tensors(
    {
        **_BEFORE,
        **AFTER,
        ".mlp.shared_norm.": ".pre_feedforward_layernorm.",
        ".mlp.shared_output_norm.": ".post_feedforward_layernorm_1.",
        ".mlp.routed_norm.": ".pre_feedforward_layernorm_2.",
        ".mlp.routed_output_norm.": ".post_feedforward_layernorm_2.",
        ".mlp.router.norm.weight": ".router.scale",
        ".mlp.router.expert_scale": ".router.per_expert_scale",
        ".mlp.router.": ".router.proj.",
        ".mlp.shared_experts.": ".mlp.",
        **{ours: theirs.replace(".mlp.", ".") for ours, theirs in TOGETHER.items()},
    },
    experts="together",
)
FAMILIES = (
    Family("gemma4_text", "Gemma4ForCausalLM", _gemma4, _write, _TENSORS),
    Family(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        partial(_gemma4, kind=_UNIFIED),
        None,
        _DENSE,
    ),
)
