"""transformers' models as an oracle: built from the same config.json, run in fp64 throughout."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.description.shape import canonical_name
from fivefold.model.transformer import Stage
from tests.model.models import batch_of

LENGTH = 24


class InFp64(TorchFunctionMode):
    """Makes fp64 of every fp32 that is asked for: norms, softmax and RoPE insist on it.

    So it does of quotients of whole numbers, which are fp32 unasked.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        if func in (Tensor.div, Tensor.__truediv__) and not args[0].is_floating_point():
            args = args[0].double(), *args[1:]
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
    with torch.device("meta" if meta else "cpu"), InFp64():
        config._experts_implementation = "eager"
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config)
    return model if meta else fill(model)


def fill(model: nn.Module) -> nn.Module:
    """The same model with random fp64 weights."""
    model.double().eval()
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):  # which is rounded to fp32
            module.embed_scale.fill_(module.scalar_embed_scale)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.dim() == 1))
        for name, buffer in model.named_buffers():
            if "score_correction" in name:
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def oracle_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits [S, V] of one row."""
    with torch.no_grad(), InFp64():
        made = model(tokens)
    return (made[0] if isinstance(made, tuple) else made.logits)[0]


def oracle_windows(model: nn.Module) -> list[int | None]:
    """Of each layer: tokens before itself that each token attends to; None: all."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    slides = [kind == "sliding_attention" and window is not None for kind in types]
    return [window - 1 if sliding else None for sliding in slides]


def our_stage(config: ModelConfig, model: nn.Module) -> Stage:
    """This project's model with the weights of theirs, in fp64."""
    stage = Stage(config, training=TrainingConfig(seq_length=LENGTH)).double().eval()
    theirs = renamed(config, model, dict(model.named_parameters()))
    held = (*model.named_buffers(), *model.named_parameters())
    biases = {name: bias for name, bias in held if "score_correction" in name}
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            source = theirs[canonical_name(config, name)]
            assert parameter.shape[1:] == source.shape[1:], name
            parameter.zero_()
            parameter[: len(source)] = source  # the vocabulary is padded
        for name, bias in biases.items():
            layer = name.split("layers.")[1].split(".")[0]
            dict(stage.named_buffers())[f"layers.{layer}.mlp.router.expert_bias"].copy_(
                bias.squeeze()
            )
    return stage


def our_logits(config: ModelConfig, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Tokens [1, S], and the logits [S, V] that this project's model gives with those weights."""
    batch = batch_of(config, [[LENGTH]])
    with torch.no_grad():
        logits = our_stage(config, model).logits(batch)
    return batch.tokens, logits[:, : config.vocab_size]


def both_gradients(
    config: ModelConfig, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of every parameter, ours and theirs, by our names, of the same random loss."""
    stage, batch = our_stage(config, model), batch_of(config, [[LENGTH]])
    generator = torch.Generator().manual_seed(2)
    shape = LENGTH, config.vocab_size
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    stage.logits(batch)[:, : config.vocab_size].backward(grad)
    with InFp64():
        model(batch.tokens).logits[0].backward(grad)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = dict(stage.named_parameters()).items()
    ours = {name: p.grad for name, p in named if p.grad is not None}
    table = slice(config.vocab_size)
    cut = {name: g[table] if _is_table(name) else g for name, g in ours.items()}
    return cut, renamed(config, model, theirs)


def _is_table(name: str) -> bool:
    return name in ("embed_tokens.weight", "lm_head.weight")


def renamed(config: ModelConfig, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their parameters, or gradients of them, under our names and in our order of features."""
    if model.config.model_type == "nemotron_h":
        return _one_mixer_each(config, tensors)
    gpt2 = model.config.model_type == "gpt2"
    second = model.config.model_type == "deepseek_v2"  # which does not read the field
    interleaved = second or getattr(model.config, "rope_interleave", True)
    pairs = model.config.model_type in _PAIRS
    after = model.config.model_type in ("exaone4", "olmo2", "olmo3", "gemma2", "gemma3_text")
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if after:
            name = name.replace("post_attention_layernorm", "post_self_attn_layernorm")
            name = name.replace("pre_feedforward_layernorm", "post_attention_layernorm")
            name = name.replace("post_feedforward_layernorm", "post_mlp_layernorm")
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        if config.num_experts is None:  # what Granite's mixtures share is then the only MLP
            name = name.replace("mlp.shared_experts.", "mlp.")
            name = name.replace("shared_mlp.input_linear.", "mlp.gate_up_proj.")
        kind = name.rpartition(".")[2]
        if gpt2 and ".c_" in name and kind == "weight":  # its linears are transposed
            value = value.T
        for theirs, ours in _LINEARS.items():
            name = name.replace(theirs, ours)
        if "linear_attn." in name:
            found |= _linear_attention(config, name.replace("linear_attn", "self_attn"), value)
        elif ".experts." in name:
            found |= _experts(config, name, value)
        elif config.multi_latent_attention and interleaved and "self_attn." in name:
            found[name] = _in_halves(config, name, value)
        elif pairs and ("q_proj" in name or "k_proj" in name):
            turned, rest = value.unflatten(0, (-1, config.head_dim)).split(
                (config.rotary_dim, config.head_dim - config.rotary_dim), dim=1
            )
            halves = torch.cat((turned[:, ::2], turned[:, 1::2], rest), dim=1)
            found[name] = halves.flatten(0, 1)
        elif "gate_up_proj" in name or "shared_mlp.input_linear" in name:
            name = name.replace("shared_mlp.input_linear", "mlp.shared_experts.gate_up_proj")
            for part, rows in zip(("gate", "up"), value.chunk(2), strict=True):
                found[name.replace("gate_up", part)] = rows
        elif any(joint in name for joint in ("c_attn", "query_key_value", "qkv_proj")):
            for letter, part in zip("qkv", _parts(config, name, value), strict=True):
                found[f"{name.rpartition('self_attn')[0]}self_attn.{letter}_proj.{kind}"] = part
        else:
            found[name] = value
    for ours, theirs in _JOINED.items():
        for name in [name for name in found if theirs[0] in name]:
            parts = [found.pop(name.replace(theirs[0], part)) for part in theirs]
            found[name.replace(theirs[0], ours)] = torch.cat(parts, dim=1).flatten(0, 1)
    return found


def _one_mixer_each(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of Nemotron-H: what is part by part there, group by group here."""
    sizes, found = config.states, dict[str, Tensor]()
    shared = [sizes.groups * sizes.key] * 2

    def by_group(parts: Sequence[Tensor]) -> Tensor:
        each = [part.unflatten(0, (sizes.groups, -1)) for part in parts]
        return torch.cat(each, dim=1).flatten(0, 1)

    for name, value in tensors.items():
        for theirs, ours in _OF_ENDS.items():
            name = name.replace(theirs, ours)
        if not name.startswith("layers."):
            found[name] = value
            continue
        _, layer, part = name.split(".", 2)
        of_mlp = config.mixer_of(int(layer)) in ("-", "E")
        norm = "post_attention_layernorm" if of_mlp else "input_layernorm"
        part = f"{norm}.weight" if part == "norm.weight" else part
        part = part.replace("mixer.", "mlp." if of_mlp else "self_attn.")
        part = part.replace("mlp.gate.", "mlp.router.")
        where = f"layers.{layer}.{part}" + ".weight" * (".experts." in part)
        if "in_proj" in part:
            z, *mixed, step = value.split([sizes.size, sizes.size, *shared, sizes.heads])
            found[where.replace("in_proj", "in_proj_xbcz")] = by_group([*mixed, z])
            found[where.replace("in_proj", "in_proj_dt")] = step
        elif "conv1d" in part:
            found[where] = by_group(value.split([sizes.size, *shared]))
        else:
            found[where] = value
    return found


def _linear_attention(config: ModelConfig, name: str, value: Tensor) -> dict[str, Tensor]:
    """Rows of queries, keys and values one after the other as each key head's; of projections that
    are joined, [key heads, rows of each, H]."""
    heads = config.linear_num_key_heads
    if "conv1d" not in name and "in_proj_qkv." not in name:
        joined = any(name.endswith(f"in_proj_{part}.weight") for part in "zba")
        return {name: value.unflatten(0, (heads, -1)) if joined else value}
    keys = heads * config.linear_key_head_dim
    parts = value.split([keys, keys, config.states.size])
    by_head = torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1)
    return {name: by_head.flatten(0, 1) if "conv1d" in name else by_head}


def _parts(config: ModelConfig, name: str, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of a joint projection: one after the other, or head by head."""
    if "c_attn" in name:
        return value.chunk(3)
    if "qkv_proj" in name:
        return value.split((config.q_size, config.k_size, config.v_size))
    queries = config.num_attention_heads // config.num_kv_heads
    heads = value.unflatten(0, (config.num_kv_heads, queries + 2, -1))
    parts = heads.split((queries, 1, 1), dim=1)
    return tuple(part.flatten(0, 2) for part in parts)


def _experts(config: ModelConfig, name: str, value: Tensor) -> dict[str, Tensor]:
    """All experts' weights as [E, out, in]; gpt-oss has [E, in, out], gate and up alternating."""
    place, _, of = name.rpartition(".experts.")
    kind = "bias" if of.endswith("_bias") else "weight"
    alternating = config.activation_func == "quick_gelu"
    if (alternating or config.moe_apply_probs_on_input) and kind == "weight":
        value = value.transpose(1, 2)
    if of.startswith("down_proj"):
        return {f"{place}.experts.down_proj.{kind}": value}
    gate, up = (value[:, ::2], value[:, 1::2]) if alternating else value.chunk(2, dim=1)
    return {f"{place}.experts.gate_proj.{kind}": gate, f"{place}.experts.up_proj.{kind}": up}


def _in_halves(config: ModelConfig, name: str, value: Tensor) -> Tensor:
    """Rotary features of DeepSeek, of which neighbours are pairs, as two halves."""
    rotary, plain = config.qk_pos_emb_head_dim, config.qk_head_dim
    places = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)])
    if "kv_a_proj." in name:
        return torch.cat((value[:-rotary], value[-rotary:][places]))
    if "q_proj." in name or "q_b_proj." in name:
        heads = value.unflatten(0, (config.num_attention_heads, -1))
        return torch.cat((heads[:, :plain], heads[:, plain:][:, places]), dim=1).flatten(0, 1)
    return value


_PAIRS = ("glm", "glm4", "ernie4_5", "ernie4_5_moe", "cohere", "cohere2", "llama4_text")
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
    "ln_attn.": "input_layernorm.",
    "ln_mlp.": "post_attention_layernorm.",
    "word_embeddings.": "embed_tokens.",
    ".self_attention.": ".self_attn.",
    "ln_2.": "post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".attn.": ".self_attn.",
    "self_attn.dense.": "self_attn.o_proj.",
    "kv_a_proj_with_mqa.": "kv_a_proj.",
    "self_attn.sinks": "self_attn.sinks.weight",
    "feed_forward.": "mlp.",
    "mlp.gate.": "mlp.router.",
    "block_sparse_moe.": "mlp.",
    "mlp.shared_expert.": "mlp.shared_experts.",
    "shared_mlp.output_linear.": "mlp.shared_experts.down_proj.",
    "router.wg.": "router.",
    "mlp.shared_mlp.": "mlp.shared_experts.",
    "query_layernorm.": "q_norm.",
    "key_layernorm.": "k_norm.",
    "dense_h_to_4h.": "up_proj.",
    "dense_4h_to_h.": "down_proj.",
}
_OF_ENDS = {
    "model.": "",
    "embeddings.": "embed_tokens.",
    "norm_f.": "norm.",
}
_JOINED = {
    "in_proj_qkvz.": ("in_proj_qkv.", "in_proj_z."),
    "in_proj_ba.": ("in_proj_b.", "in_proj_a."),
}
_LINEARS = {
    "self_attn.c_proj.": "self_attn.o_proj.",
    "mlp.c_fc.": "mlp.up_proj.",
    "mlp.c_proj.": "mlp.down_proj.",
}
