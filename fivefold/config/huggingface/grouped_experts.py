"""Experts of DeepSeek-V2 and V3, and of families with V3's: in groups, after dense layers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import MAX_LAYERS, layer_frequency

_V2: Mapping[str, Any] = MappingProxyType(
    {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    }
)
_V3: Mapping[str, Any] = MappingProxyType(
    {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
    }
)
_ONE_GROUP = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek_v2": _V2,
        "deepseek_v3": _V3,
        "kimi_k2": _V3,
        "glm4_moe": {**_V3, **_ONE_GROUP, "first_k_dense_replace": 1},
        "solar_open": {**_V3, **_ONE_GROUP, "first_k_dense_replace": 0},
        "glm4_moe_lite": {
            **{**_V3, **_ONE_GROUP},
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        "exaone_moe": {
            **{**_V3, **_ONE_GROUP},
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
        },
        "dots1": {
            **{**_V3, **_ONE_GROUP, "first_k_dense_replace": 0, "n_shared_experts": None},
            "norm_topk_prob": False,  # as which it cannot be trained here
        },
    }
)
"""Values of a router's fields where a config.json does not give them."""
_LISTED = "exaone_moe", "glm4_moe_lite"
"""Families whose files may say of each layer whether it has experts."""


def grouped_experts(reader: Reader, kind: str, layers: int) -> dict[str, Any]:
    """ModelConfig settings of the experts; empty for a model without."""
    family, second = _FAMILIES[kind], kind == "deepseek_v2"
    read_balancing(reader)
    reader.without_effect("aux_loss_alpha", "seq_aux", "ep_size")
    experts = _count(reader, kind)
    names = ("greedy", "group_limited_greedy") if second else ("noaux_tc",)
    method = reader.text("topk_method", default=family["topk_method"], choices=names)
    scores = family["scoring_func"]
    # dots.llm1's own files have the method's name there.
    reader.fixed("scoring_func", scores, *(["noaux_tc"] if kind == "dots1" else []))
    if reader.flag("norm_topk_prob", family["norm_topk_prob"]) == second:
        reader.unsupported("norm_topk_prob", second, [not second])
    factor = reader.number("routed_scaling_factor", family["routed_scaling_factor"])
    size = reader.optional_size if second else reader.size
    counts = {name: size(name, default=family[name]) for name in ("n_group", "topk_group")}
    sparse = _sparse_layers(reader, kind, layers)
    name = "num_shared_experts" if kind == "exaone_moe" else "n_shared_experts"
    shared = reader.optional_size(name, default=family["n_shared_experts"], least=0)
    inner, topk = reader.size("moe_intermediate_size"), reader.size("num_experts_per_tok")
    reader.fixed("moe_layer_freq", 1)
    if experts is None or not any(sparse):
        return {}
    if topk == 1 and not second:
        reader.unsupported("num_experts_per_tok", topk, [2], "its weight would be normalised to 1")
    if method == "group_limited_greedy":
        for name in (name for name, count in counts.items() if count is None):
            reader.unsupported(name, None, [1], f'topk_method = "{method}" needs it')
    groups, chosen = (count or 1 for count in counts.values())
    if method != "greedy" and chosen > groups:
        reader.unsupported("topk_group", chosen, [groups], f"there are n_group = {groups}")
    grouped = method != "greedy" and chosen < groups
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": chosen if grouped else None,
        "moe_router_group_scores": (1 if second else 2) if grouped else None,
        "moe_router_score_function": scores,
        "moe_router_pre_softmax": second,
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
        "moe_router_enable_expert_bias": not second,
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": (shared or 0) * inner or None,
        "moe_layer_freq": layer_frequency(sparse),
    }


def _count(reader: Reader, kind: str) -> int | None:
    """The number of experts; None, where a family may have none."""
    if kind == "exaone_moe":
        return reader.size("num_experts")
    count = reader.size if kind in ("solar_open", "glm4_moe_lite") else reader.optional_size
    return count("n_routed_experts", "num_experts", "num_local_experts")


def _sparse_layers(reader: Reader, kind: str, layers: int) -> list[bool]:
    """Which layers have experts: those after the first few, or those that are listed."""
    first = _FAMILIES[kind]["first_k_dense_replace"]
    usual = first
    first = reader.size("first_k_dense_replace", default=first, least=0)
    listed = reader.texts("mlp_layer_types", ("dense", "sparse")) if kind in _LISTED else None
    if listed is None:
        if kind == "glm4_moe_lite" and first != usual:
            why = "transformers reads mlp_layer_types alone"
            reader.unsupported("first_k_dense_replace", first, [usual], why)
        return [layer >= first for layer in range(layers)]
    if not reader.has_each_layer("mlp_layer_types", listed, layers):
        return [False] * layers
    return [word == "sparse" for word in listed]


def predictions(reader: Reader) -> int:
    """Layers that predict further tokens."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return reader.size(*names, default=1, least=0, most=MAX_LAYERS)
