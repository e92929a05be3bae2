"""Qwen2 and Qwen3, and their mixtures; Seed-OSS, with Qwen2's biases; SmolLM3, with its windows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import EACH, TOGETHER, Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import (
    LlamaLike,
    bias_fields,
    both_biases,
    no_biases,
    qkv_biases,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import layer_frequency, unrotated_frequency
from fivefold.config.model import ModelConfig

_Usual = Callable[[int, int], bool]
"""(layer, max_window_layers) -> whether it has a window, if the file does not list those that do"""


def qwen_windows(
    reader: Reader,
    layers: int,
    *,
    usual: _Usual = lambda layer, first: layer >= first,
    default: int | None = 4096,
    least: int = 2,
    first: int = 28,
    switched: bool = True,
) -> dict[str, Any]:
    """A window in listed layers, or in those from `max_window_layers` on, whose default is `first`;
    if it is switched, only where `use_sliding_window` is true."""
    width = windows.width_of(reader, default, least=least)
    if not switched:  # transformers has no such field; files that say false have no window
        reader.fixed("use_sliding_window", width is not None)
    elif not reader.flag("use_sliding_window", False):
        width = None
    first = reader.size("max_window_layers", default=first, least=0)
    listed = windows.listed(reader, layers)
    if listed is None:
        slides = tuple(width is not None and usual(layer, first) for layer in range(layers))
        return windows.settings(width, slides)
    if any(listed) and width is None:
        why = "there is no window"
        reader.unsupported("layer_types", "sliding_attention", ["full_attention"], why)
    return windows.settings(width, listed)


def _windows_everywhere(reader: Reader, layers: int) -> dict[str, Any]:
    """Qwen3's mixtures have a window in all layers."""
    width = windows.width_of(reader)
    used = reader.flag("use_sliding_window", False)
    reader.without_effect("max_window_layers")
    return windows.settings(width if used else None, (True,) * layers)


def _window_fields(model: ModelConfig) -> Fields:
    """Of `qwen_windows`."""
    if model.window_size is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window_size + 1,
        "layer_types": windows.written_types(model),
        "max_window_layers": 0,
    }


def _qwen2_biases(reader: Reader) -> dict[str, Any]:
    return no_biases(reader) | {"add_qkv_bias": True}


def _qwen2_moe_biases(reader: Reader) -> dict[str, Any]:
    return no_biases(reader) | {"add_qkv_bias": reader.flag("qkv_bias", True)}


_QWEN2 = LlamaLike(num_key_value_heads=32, windows=qwen_windows, biases=_qwen2_biases)
_QWEN3 = LlamaLike(num_key_value_heads=32, head_dim=128, heads="per_head", windows=qwen_windows)
_QWEN2_MOE = LlamaLike(
    num_key_value_heads=16,
    null_key_value_heads=False,
    biases=_qwen2_moe_biases,
    # It writes 0 if there is no window.
    windows=partial(
        qwen_windows, usual=lambda layer, first: layer < first and not layer % 2, least=0
    ),
)
_QWEN3_MOE = LlamaLike(num_key_value_heads=4, heads="per_head", windows=_windows_everywhere)


def _qwen2(reader: Reader) -> ModelConfig:
    reader.fixed("use_mrope", False)
    return _QWEN2.read(reader)


def expert_sizes(reader: Reader, *, normalised: bool) -> dict[str, Any]:
    """Sizes of experts, and whether the weights of those chosen are normalised, by default so."""
    kept = reader.flag("norm_topk_prob", normalised)
    return {
        "num_experts": reader.size("num_experts", "num_local_experts"),
        "moe_router_topk": reader.size("num_experts_per_tok"),
        "moe_ffn_hidden_size": reader.size("moe_intermediate_size"),
        "moe_router_pre_softmax": not kept,
    }


def qwen_experts(
    reader: Reader, model: ModelConfig, *, shared: int | None, normalised: bool = False
) -> ModelConfig:
    """Experts in some layers, smaller than the other layers' MLPs.

    Args:
        reader: reader of the file.
        model: the dense model.
        shared: the default size of a gated expert of all tokens; None: there is none.
        normalised: the default of `norm_topk_prob`.
    """
    read_balancing(reader)
    dense = set(reader.sizes("mlp_only_layers"))
    step = reader.size("decoder_sparse_step", default=1)
    experts = expert_sizes(reader, normalised=normalised)
    if shared is not None:
        size = reader.size("shared_expert_intermediate_size", default=shared)
        experts |= {"moe_shared_expert_intermediate_size": size, "moe_shared_expert_gate": True}
    else:  # Qwen3-Coder says what it has not
        reader.fixed("shared_expert_intermediate_size", 0)
        reader.fixed("qkv_bias", False)
        reader.fixed("use_qk_norm", True)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(model.num_layers)]
    if not any(sparse):
        return model
    return replace(model, **experts, moe_layer_freq=layer_frequency(sparse))


def qwen_expert_fields(model: ModelConfig) -> Fields:
    """Of `qwen_experts`."""
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "mlp_only_layers": [i for i in range(model.num_layers) if not model.is_moe(i)],
        "decoder_sparse_step": 1,
    }


def _qwen2_moe(reader: Reader) -> ModelConfig:
    return qwen_experts(reader, _QWEN2_MOE.read(reader), shared=5632)


def _qwen3_moe(reader: Reader) -> ModelConfig:
    return qwen_experts(reader, _QWEN3_MOE.read(reader), shared=None)


def _writes(like: LlamaLike) -> Callable[[ModelConfig], Fields]:
    return lambda model: like.write(model) | _window_fields(model)


def _write_qwen3_moe(model: ModelConfig) -> Fields:
    window = _window_fields(model)
    window.pop("layer_types", None)  # which it has not: a window is of all layers
    return _QWEN3_MOE.write(model) | window | qwen_expert_fields(model)


def _write_qwen2_moe(model: ModelConfig) -> Fields:
    more = {
        "shared_expert_intermediate_size": model.shared_ffn_size,
        "qkv_bias": model.add_qkv_bias,
    }
    return _QWEN2_MOE.write(model) | _window_fields(model) | qwen_expert_fields(model) | more


_SEED = LlamaLike(
    num_key_value_heads=8, head_dim=128, null_head_dim=True, biases=qkv_biases(True), padded=True
)


def _seed(reader: Reader) -> ModelConfig:
    """Biases of queries, keys and values, of attention's output, and of MLPs; no dropout of
    embeddings."""
    model = _SEED.read(reader)
    output, mlp = reader.flag("attention_out_bias", False), reader.flag("mlp_bias", False)
    everywhere = model.add_qkv_bias and output and mlp
    dropout = reader.number("residual_dropout", 0.1)
    return replace(
        model,
        add_bias_linear=everywhere,
        add_qkv_bias=model.add_qkv_bias and not everywhere,
        attention_out_bias=output and not everywhere,
        mlp_bias=mlp and not everywhere,
        hidden_dropout=dropout,
        embedding_dropout=0.0 if dropout else None,
        attention_dropout=reader.number("attention_dropout", 0.1),
    )


def _write_seed(model: ModelConfig) -> Fields:
    biases = {"attention_out_bias": model.output_bias, "mlp_bias": model.inner_bias}
    more = {"attention_bias": model.qkv_bias, "residual_dropout": model.hidden_dropout}
    return _SEED.write(model) | biases | more


def _smollm_windows(reader: Reader, layers: int) -> dict[str, Any]:
    without = windows.unrotated(reader, layers, may_be_empty=False)
    found = qwen_windows(reader, layers, usual=lambda layer, _: without[layer], default=None)
    return {"no_rope_freq": unrotated_frequency(without), **found}


_SMOLLM = LlamaLike(
    num_key_value_heads=4,
    rope_theta=2000000.0,
    tied=True,
    biases=both_biases,
    windows=_smollm_windows,
    padded=True,
)


def _write_smollm(model: ModelConfig) -> Fields:
    rotates = [int(model.rotates(layer)) for layer in range(model.num_layers)]
    positions = {"no_rope_layers": rotates, **_window_fields(model)}
    return _SMOLLM.write(model) | positions | bias_fields(model)


QWEN_MOE_NAMES: Names = {
    ".mlp.router.": ".mlp.gate.",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
    **EACH,
}
QWEN3_VL_MOE = Tensors(
    {".mlp.router.": ".mlp.gate.", **TOGETHER}, experts="transposed", also="untransposed"
)
"""Of the text models within Qwen3-VL's mixtures."""
_MOE = Tensors(QWEN_MOE_NAMES)
FAMILIES = (
    Family("qwen2", "Qwen2ForCausalLM", _qwen2, _writes(_QWEN2)),
    Family("qwen3", "Qwen3ForCausalLM", _QWEN3.read, _writes(_QWEN3)),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, _write_qwen2_moe, _MOE),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _write_qwen3_moe, _MOE),
    Family("seed_oss", "SeedOssForCausalLM", _seed, _write_seed),
    Family("smollm3", "SmolLM3ForCausalLM", _SMOLLM.read, _write_smollm),
)
