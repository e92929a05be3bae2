"""Experts of DeepSeek-V2 and V3, and of families with V3's: in groups, after dense layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.family import EACH, Fields
from fivefold.config.huggingface.generic import read_balancing, refuse_one_expert
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import MAX_LAYERS, layer_frequency
from fivefold.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class GroupedExperts:
    """A router over groups of experts, with a family's defaults for absent fields.

    Attributes:
        scores: `scoring_func`, the only one that transformers has.
        scores_also: what else files say there.
        method: `topk_method`.
        methods: values of `topk_method` that the family has.
        normalised: `norm_topk_prob`.
        scale: `routed_scaling_factor`.
        null_scale: whether null there is 1.
        groups: `n_group`.
        chosen_groups: `topk_group`.
        dense_layers: `first_k_dense_replace`.
        listed: whether files may say of each layer whether it has experts.
        first_counts: whether `first_k_dense_replace` counts where they do not.
        shared: `n_shared_experts`.
        shared_name: its name.
        experts: names of their number.
        always: whether there are experts in any case.
        either: whether a softmax may be over the chosen experts or over all (`norm_topk_prob`),
            without groups.
    """

    scores: str
    method: str
    normalised: bool
    scale: float
    groups: int | None
    chosen_groups: int | None
    dense_layers: int
    shared: int | None
    methods: tuple[str, ...] = ("noaux_tc",)
    scores_also: tuple[str, ...] = ()
    listed: bool = False
    first_counts: bool = True
    shared_name: str = "n_shared_experts"
    experts: tuple[str, ...] = ("n_routed_experts", "num_experts", "num_local_experts")
    always: bool = False
    null_scale: bool = False
    either: bool = False

    @property
    def second(self) -> bool:
        """Whether it is DeepSeek-V2's router: a softmax before the choice, without a bias."""
        return self.scores == "softmax"

    def read(self, reader: Reader, layers: int) -> dict[str, Any]:
        """ModelConfig settings of the experts; empty for a model without experts."""
        second = self.second
        read_balancing(reader)
        reader.without_effect("aux_loss_alpha", "seq_aux", "ep_size")
        experts = (reader.size if self.always else reader.optional_size)(*self.experts)
        method = reader.text("topk_method", default=self.method, choices=self.methods)
        reader.fixed("scoring_func", self.scores, *self.scores_also)
        normalised = reader.flag("norm_topk_prob", self.normalised)
        if normalised == second and not self.either:
            reader.unsupported("norm_topk_prob", second, [not second])
        number = reader.number_or_null if self.null_scale else reader.number
        factor = number("routed_scaling_factor", self.scale)
        size = reader.optional_size if second and not self.either else reader.size
        counts = {"n_group": self.groups, "topk_group": self.chosen_groups}
        counts = {name: size(name, default=count) for name, count in counts.items()}
        sparse = self._sparse_layers(reader, layers)
        shared = reader.optional_size(self.shared_name, default=self.shared, least=0)
        inner, topk = reader.size("moe_intermediate_size"), reader.size("num_experts_per_tok")
        reader.fixed("moe_layer_freq", 1, [int(has) for has in sparse])
        if experts is None or not any(sparse):
            return {}
        if not second:
            refuse_one_expert(reader, topk)
        if method == "group_limited_greedy":
            for name in (name for name, count in counts.items() if count is None):
                reader.unsupported(name, None, [1], f'topk_method = "{method}" needs it')
        groups, chosen = (count or 1 for count in counts.values())
        if method != "greedy" and chosen > groups:
            reader.unsupported("topk_group", chosen, [groups], f"there are n_group = {groups}")
        if self.either and chosen < groups:
            why = f"of n_group = {groups}, compared by softmaxes over all experts"
            reader.unsupported("topk_group", chosen, [groups], why)
        grouped = method != "greedy" and chosen < groups
        return {
            "num_experts": experts,
            "moe_router_topk": topk,
            "moe_router_num_groups": groups if grouped else None,
            "moe_router_group_topk": chosen if grouped else None,
            "moe_router_group_scores": (1 if second else 2) if grouped else None,
            "moe_router_score_function": self.scores,
            "moe_router_pre_softmax": second and not normalised,
            "moe_router_topk_scaling_factor": None if factor in (None, 1.0) else factor,
            "moe_router_enable_expert_bias": not second,
            "moe_ffn_hidden_size": inner,
            "moe_shared_expert_intermediate_size": (shared or 0) * inner or None,
            "moe_layer_freq": layer_frequency(sparse),
        }

    def write(self, model: ModelConfig) -> Fields:
        """Fields of the experts, by DeepSeek's names."""
        return {
            "n_routed_experts": model.num_experts or 1,  # of no layer: transformers wants a number
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.expert_ffn_size,
            "n_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
            "first_k_dense_replace": written_sparse(model).count("dense"),
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
            "scoring_func": self.scores,
            "norm_topk_prob": not (model.moe_router_pre_softmax if self.either else self.second),
            "moe_layer_freq": 1,
        }

    def _sparse_layers(self, reader: Reader, layers: int) -> list[bool]:
        """Which layers have experts: all but the first few, or those that are listed."""
        first = reader.size("first_k_dense_replace", default=self.dense_layers, least=0)
        listed = listed_sparse(reader, layers) if self.listed else None
        if listed is None:
            if not self.first_counts and first != self.dense_layers:
                why = "transformers reads mlp_layer_types alone"
                reader.unsupported("first_k_dense_replace", first, [self.dense_layers], why)
            return [layer >= first for layer in range(layers)]
        return listed


V2 = GroupedExperts(
    scores="softmax",
    method="greedy",
    normalised=False,
    scale=1.0,
    groups=None,
    chosen_groups=None,
    dense_layers=0,
    shared=2,
    methods=("greedy", "group_limited_greedy"),
)
V3 = GroupedExperts(
    scores="sigmoid",
    method="noaux_tc",
    normalised=True,
    scale=2.5,
    groups=8,
    chosen_groups=4,
    dense_layers=3,
    shared=1,
)
ONE_GROUP = replace(V3, groups=1, chosen_groups=1, dense_layers=1)
DEEPSEEK_NAMES: Mapping[str, str] = MappingProxyType(
    {
        ".kv_a_proj.": ".kv_a_proj_with_mqa.",
        ".mlp.router.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.router.": ".mlp.gate.",
        **EACH,
    }
)
"""How families with V2's or V3's layers name tensors."""


def predictions(reader: Reader) -> int:
    """The number of multi-token prediction layers."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return reader.size(*names, default=1, least=0, most=MAX_LAYERS)


def sigmoid_experts(reader: Reader, layers: int, *, first: int, factor: str) -> dict[str, Any]:
    """ModelConfig settings of V3's experts without groups, in all layers but the first few.

    Args:
        reader: reader of the file.
        layers: number of layers.
        first: the family's default of the layers without experts.
        factor: name of the factor on weights of experts.
    """
    dense = reader.size("num_dense_layers", default=first, least=0)
    experts, inner = reader.size("num_experts"), reader.size("moe_intermediate_size")
    scale, topk = reader.number(factor, 1.0), reader.size("num_experts_per_tok")
    if dense >= layers:
        return {}
    refuse_one_expert(reader, topk)
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
        "moe_router_enable_expert_bias": True,
        "moe_ffn_hidden_size": inner,
        "moe_layer_freq": layer_frequency([layer >= dense for layer in range(layers)]),
    }


def sigmoid_expert_fields(model: ModelConfig, factor: str) -> Fields:
    """Of `sigmoid_experts`."""
    return {
        "num_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "num_dense_layers": written_sparse(model).count("dense"),
        factor: model.moe_router_topk_scaling_factor or 1.0,
    }


def no_predictions(reader: Reader) -> None:
    """For families whose prediction layers are neither published nor built by transformers."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        reader.fixed(name, 0)


def read_of_sarvam(reader: Reader) -> None:
    """Read fields of Sarvam's published files that transformers does not use."""
    reader.fixed("score_function", "sigmoid")
    for name in ("moe_router_enable_expert_bias", "use_rmsnorm"):
        reader.fixed(name, True)
    reader.fixed("use_bias", False)
    for name in ("embedding_dropout", "output_dropout"):
        reader.fixed(name, 0.0)
    reader.without_effect("router_dtype")


def listed_sparse(reader: Reader, layers: int) -> list[bool] | None:
    """Which layers have experts, if the config.json lists them; else None."""
    listed = reader.texts("mlp_layer_types", ("dense", "sparse"))
    if listed is None:
        return None
    if not reader.has_each_layer("mlp_layer_types", listed, layers):
        return [False] * layers
    return [word == "sparse" for word in listed]


def written_sparse(model: ModelConfig) -> list[str]:
    """Whether each layer has experts."""
    return ["sparse" if model.is_moe(layer) else "dense" for layer in range(model.num_layers)]
