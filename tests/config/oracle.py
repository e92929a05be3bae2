"""transformers' models as an oracle: built from the same config.json, run in fp64 throughout."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.config.model import ModelConfig
from fivefold.model.shape import canonical_name
from fivefold.model.transformer import Stage
from tests.model.models import batch_of

LENGTH = 24


class _Double(TorchFunctionMode):
    """Makes fp64 of every fp32 that is asked for: norms, softmax and RoPE insist on it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **named)


def config_of(fields: Mapping[str, Any]) -> Any:
    """What transformers reads of a config.json; it has DeepSeek-V3 for Kimi-K2."""
    from transformers import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    kind = {"kimi_k2": "deepseek_v3"}.get(fields["model_type"], fields["model_type"])
    return CONFIG_MAPPING[kind].from_dict(copy.deepcopy({**fields, "model_type": kind}))


def oracle(fields: Mapping[str, Any], *, meta: bool = False) -> nn.Module:
    """transformers' causal language model of a config.json, with random fp64 weights.

    Raises whatever transformers raises for what it does not understand.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = config_of(fields)
    with torch.device("meta" if meta else "cpu"), _Double():
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config)
    if meta:
        return model
    model.double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.dim() == 1))
    return model


def oracle_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits [S, V] of one row."""
    with torch.no_grad(), _Double():
        made = model(tokens)
    return (made[0] if isinstance(made, tuple) else made.logits)[0]


def oracle_window(model: nn.Module) -> int | None:
    """Tokens before itself that each token of each layer attends to; None: all."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    types = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    return window - 1 if window is not None and types == {"sliding_attention"} else None


def our_logits(config: ModelConfig, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Tokens [1, S], and the logits [S, V] that this project's model gives with those weights."""
    stage = Stage(config).double().eval()
    theirs = _renamed(config, dict(model.named_parameters()))
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            source = theirs[canonical_name(config, name)]
            assert parameter.shape[1:] == source.shape[1:], name
            parameter.zero_()
            parameter[: len(source)] = source  # the vocabulary is padded
        batch = batch_of(config, [[LENGTH]])
        return batch.tokens, stage.logits(None, batch)[:, : config.vocab_size]


def _renamed(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their parameters under our names; joint projections are taken apart."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        kind = name.rpartition(".")[2]
        if ".c_" in name and kind == "weight":  # GPT-2's linears are transposed
            value = value.T
        for theirs, ours in _LINEARS.items():
            name = name.replace(theirs, ours)
        if "c_attn" in name:
            parts = value.chunk(3)
        elif "query_key_value" in name:  # head by head
            heads = value.unflatten(0, (config.num_attention_heads, 3, -1))
            parts = tuple(heads[:, part].flatten(0, 1) for part in range(3))
        else:
            found[name] = value
            continue
        for letter, part in zip("qkv", parts, strict=True):
            found[f"{name.rpartition('self_attn')[0]}self_attn.{letter}_proj.{kind}"] = part
    return found


_NAMES = {
    "transformer.": "model.",
    "gpt_neox.": "model.",
    "model.h.": "model.layers.",
    "model.": "",
    "wte.": "embed_tokens.",
    "wpe.": "embed_positions.",
    "embed_in.": "embed_tokens.",
    "embed_out.": "lm_head.",
    "final_layer_norm.": "norm.",
    "ln_f.": "norm.",
    "ln_1.": "input_layernorm.",
    "ln_2.": "post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".attn.": ".self_attn.",
    "self_attn.dense.": "self_attn.o_proj.",
    "dense_h_to_4h.": "up_proj.",
    "dense_4h_to_h.": "down_proj.",
}
_LINEARS = {
    "self_attn.c_proj.": "self_attn.o_proj.",
    "mlp.c_fc.": "mlp.up_proj.",
    "mlp.c_proj.": "mlp.down_proj.",
}
