"""A second, deliberately naive transformer: one document, one head and one query at a time."""

import cmath
import math

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig


def reference_logits(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [S, V] of one document."""
    x = weights["embed_tokens.weight"][tokens]
    if model.position_embedding_type == "learned_absolute":
        x = x + weights["embed_positions.weight"][: len(tokens)]
    for layer in range(model.num_layers):
        prefix = f"layers.{layer}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        x = x + _attention(model, own, _norm(model, own, "input_layernorm", x))
        x = x + _mlp(model, own, _norm(model, own, "post_attention_layernorm", x))
    x = _norm(model, weights, "norm", x)
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return x @ head[: model.vocab_size].T


def _linear(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", torch.zeros(()))


def _norm(model: ModelConfig, own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if f"{name}.bias" in own:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
        return centred / scale * own[f"{name}.weight"] + own[f"{name}.bias"]
    scale = (x.pow(2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt()
    return x / scale * own[f"{name}.weight"]


def _mlp(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    up = _linear(own, "mlp.up_proj", x)
    if model.gated_linear_unit:
        gate = _linear(own, "mlp.gate_proj", x)
        return _linear(own, "mlp.down_proj", gate / (1 + (-gate).exp()) * up)
    cubic = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return _linear(own, "mlp.down_proj", 0.5 * up * (1 + cubic.tanh()))


def _attention(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    D, shared = model.head_dim, model.num_attention_heads // model.num_kv_heads
    q, k, v = (_linear(own, f"self_attn.{name}_proj", x) for name in "qkv")
    outputs = []
    for head in range(model.num_attention_heads):
        group = head // shared
        q_SD = q[:, head * D : (head + 1) * D]
        k_SD, v_SD = (y[:, group * D : (group + 1) * D] for y in (k, v))
        if model.qk_layernorm:
            q_SD = _norm(model, own, "self_attn.q_norm", q_SD)
            k_SD = _norm(model, own, "self_attn.k_norm", k_SD)
        if model.position_embedding_type == "rope":
            q_SD, k_SD = _rope(model, q_SD), _rope(model, k_SD)
        rows = []
        for s in range(len(x)):
            scores = k_SD[: s + 1] @ q_SD[s] / math.sqrt(D)
            rows.append(scores.softmax(0) @ v_SD[: s + 1])
        outputs.append(torch.stack(rows))
    return _linear(own, "self_attn.o_proj", torch.cat(outputs, dim=1))


def _rope(model: ModelConfig, x_SD: Tensor) -> Tensor:
    half = model.head_dim // 2
    turned = torch.empty_like(x_SD)
    for position in range(len(x_SD)):
        for i in range(half):
            turn = cmath.exp(1j * position * reference_frequency(model, i))
            pair = complex(x_SD[position, i], x_SD[position, i + half]) * turn
            turned[position, i], turned[position, i + half] = pair.real, pair.imag
    return turned


def reference_frequency(model: ModelConfig, i: int) -> float:
    """RoPE's angle per position, with the case distinction of Llama 3.1's published code."""
    frequency = 1.0 / model.rotary_base ** (2 * i / model.head_dim)
    if not model.use_rope_scaling:
        return frequency
    wavelength = 2 * math.pi / frequency
    context = model.rope_original_max_position_embeddings
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / model.rope_scaling_factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / model.rope_scaling_factor + smooth * frequency
