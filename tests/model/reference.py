"""A second, deliberately naive transformer: one document, one head and one query at a time."""

import cmath
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig


def reference_logits(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [S, V] of one document."""
    x = weights["embed_tokens.weight"][tokens] * model.embedding_multiplier
    if model.position_embedding_type == "learned_absolute":
        table = weights["embed_positions.weight"][model.position_embedding_offset :]
        x = x + table[: len(tokens)]
    if model.embed_layernorm:
        x = _norm(model, weights, "embed_norm", x)
    for layer in range(model.num_layers):
        prefix = f"layers.{layer}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        window = model.window_of(layer)
        turns = model.no_rope_freq is None or (layer + 1) % int(model.no_rope_freq)
        still = {"position_embedding_type": "learned_absolute", "attention_chunk_size": None}
        seen = model if turns else replace(model, **still)
        if window is not None and model.rotary_base_local is not None:
            local = model.rotary_base_local
            seen = replace(seen, rotary_base=local, use_rope_scaling=False, rope_type="rope")
            share = 1.0 if model.rope_type == "proportional" else model.rotary_percent
            seen = replace(seen, rotary_percent=share, rotary_seq_len_interpolation_factor=None)
        if window is not None:
            seen = replace(
                seen,
                num_query_groups=model.num_query_groups_local or model.num_query_groups,
                kv_channels=model.kv_channels_local or model.kv_channels,
                softmax_type=model.softmax_type_local or model.softmax_type,
                keys_as_values=False,
            )
        normed = _norm(model, own, "input_layernorm", x)
        mixer = model.mixer_of(layer)
        if mixer in ("-", "E"):
            attended = torch.zeros_like(x)
        elif model.is_linear(layer):
            variants = {
                "kimi_delta_attention": _kimi_delta,
                "short_convolution": _short_convolution,
            }
            linear = variants.get(str(model.experimental_attention_variant), _delta_net)
            attended = (_mamba if mixer == "M" else linear)(model, own, normed)
        else:
            attended = _attention(seen, own, normed, window)
        attended = _norm(model, own, "post_self_attn_layernorm", attended)
        y = x + attended * model.residual_multiplier
        read = x if model.parallel_residual else y
        made = torch.zeros_like(x)
        if mixer in (None, "-"):
            made = _mlp(model, own, _norm(model, own, "post_attention_layernorm", read))
        x = y + _norm(model, own, "post_mlp_layernorm", made) * model.residual_multiplier
        x = x * (model.layer_scalar or 1.0)
    x = _norm(model, weights, "norm", x)
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    logits = x @ head[: model.vocab_size].T / model.logits_scaling
    logits = logits + weights.get("lm_head.bias", torch.zeros(model.vocab_size))[: model.vocab_size]
    return _capped(logits, model.final_logit_softcapping)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _linear(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", torch.zeros(()))


def _norm(model: ModelConfig, own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x as it is, where the model has no weight of that name."""
    if model.parallel_residual_one_norm and name == "post_attention_layernorm":
        name = "input_layernorm"
    after = name in ("post_self_attn_layernorm", "post_mlp_layernorm") and not model.norms_after
    bare = not (model.norm_elementwise_affine or name.startswith("self_attn.") or after)
    if f"{name}.weight" not in own and not bare:
        return x
    factor = 1.0 if bare else model.apply_layernorm_1p + own[f"{name}.weight"]
    latent = name.endswith("_a_layernorm") and model.latent_norm_epsilon
    epsilon = latent or model.norm_epsilon
    if model.normalization == "LayerNorm" and not name.startswith("self_attn."):
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
        return centred / scale * factor + own.get(f"{name}.bias", 0.0)
    scale = (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return x / scale * factor


def _unit(model: ModelConfig, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_epsilon).sqrt()


def _mlp(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    up = _linear(own, "mlp.up_proj", x)
    slope = 1.702 if model.activation_func == "quick_gelu" else 1.0
    squared = model.activation_func == "squared_relu"
    if model.gated_linear_unit:
        gate, bound = _linear(own, "mlp.gate_proj", x), model.activation_func_clamp_value or 1e9
        gate, up = gate.clamp(max=bound), up.clamp(-bound, bound) + model.glu_linear_offset
        curve = gate.clamp(min=0) ** 2 if squared else gate / (1 + (-slope * gate).exp())
        return _linear(own, "mlp.down_proj", curve * up)
    if squared:
        return _linear(own, "mlp.down_proj", up.clamp(min=0) ** 2)
    if model.activation_func == "relu":
        return _linear(own, "mlp.down_proj", up.clamp(min=0))
    if model.activation_func == "xielu":
        p, n = (own[f"mlp.act_fn.alpha_{sign}"].exp().log1p() for sign in "pn")
        curve = torch.where(up > 0, p * up**2, (n + 0.5) * (up.clamp(max=-1e-6).exp() - 1 - up))
        return _linear(own, "mlp.down_proj", curve + up / 2)
    if model.activation_func == "quick_gelu":
        return _linear(own, "mlp.down_proj", up / (1 + (-slope * up).exp()))
    cubic = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return _linear(own, "mlp.down_proj", 0.5 * up * (1 + cubic.tanh()))


def _attention(model: ModelConfig, own: dict[str, Tensor], x: Tensor, window: int | None) -> Tensor:
    heads = _latent_heads if model.multi_latent_attention else _plain_heads
    chosen = _chosen(model, own, x)
    outputs = []
    for head, (q_SD, k_SD, v_SV, scale) in enumerate(heads(model, own, x)):
        rows = []
        for s in range(len(x)):
            first = 0 if window is None else max(s - window, 0)
            if model.attention_chunk_size is not None:
                first = max(first, s - s % model.attention_chunk_size)
            keys = list(range(first, s + 1)) if chosen is None else chosen[s]
            products = k_SD[keys] @ q_SD[s] * scale
            scores = _capped(products, model.attn_logit_softcapping).exp()
            total = scores.sum()
            if model.softmax_type == "learnable":
                total = total + own["self_attn.sinks.weight"][head].exp()
            rows.append(scores / total @ v_SV[keys])
        outputs.append(torch.stack(rows))
        if model.attention_output_gate:
            D = model.head_dim
            both = _linear(own, "self_attn.q_proj", x)[:, 2 * head * D : 2 * (head + 1) * D]
            outputs[-1] = outputs[-1] / (1 + (-both[:, D:]).exp())
    return _linear(own, "self_attn.o_proj", torch.cat(outputs, dim=1))


def _chosen(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> list[list[int]] | None:
    """Of each token: those with the best scores of an indexer, if there is one."""
    if model.experimental_attention_variant != "dsa":
        return None
    name, shape, rotary = "self_attn.indexer", model.indexer, model.rotary_dim
    read = x
    if model.q_lora_rank is not None:
        low = _linear(own, "self_attn.q_a_proj", x)
        read = _norm(model, own, "self_attn.q_a_layernorm", low)
    key = _linear(own, f"{name}.wk", x)
    key = (key - key.mean(1, keepdim=True)) / (
        key.var(1, correction=0, keepdim=True) + model.latent_epsilon
    ).sqrt()
    key = key * (model.apply_layernorm_1p + own[f"{name}.k_norm.weight"])
    key = key + own[f"{name}.k_norm.bias"]
    queries = _linear(own, f"{name}.wq_b", read).split(shape.dim, dim=1)
    key, *queries = (
        torch.cat((_rope(model, y[:, :rotary]), y[:, rotary:]), dim=1) for y in (key, *queries)
    )
    factors = _linear(own, f"{name}.weights_proj", x)
    found = []
    for s in range(len(x)):
        products = [(key[: s + 1] @ q[s]).clamp(min=0) for q in queries]
        scores = sum(f * p for f, p in zip(factors[s], products, strict=True))
        ranked = sorted(range(s + 1), key=lambda k: (-float(scores[k]), k))
        found.append(ranked[: shape.topk])
    return found


def _delta_net(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """Gated DeltaNet, token by token."""
    K, V, heads = model.linear_key_head_dim, model.linear_value_head_dim, model.linear_num_key_heads
    shared = model.linear_num_value_heads // heads
    mixed, outputs = 2 * K + shared * V, []
    projected = _linear(own, "self_attn.in_proj_qkvz", x).unflatten(1, (heads, -1))
    rates = _linear(own, "self_attn.in_proj_ba", x).unflatten(1, (heads, 2, shared))
    taps = own["self_attn.conv1d.weight"][:, 0].unflatten(0, (heads, mixed))
    for head in range(heads):
        rows = []
        for s in range(len(x)):
            reach = range(min(model.linear_conv_kernel_dim, s + 1))
            terms = [projected[s - j, head, :mixed] * taps[head, :, -1 - j] for j in reach]
            rows.append(_silu(torch.stack(terms).sum(0)))
        q, k, v = torch.stack(rows).split([K, K, shared * V], dim=1)
        for value in range(shared):
            place = head * shared + value
            state, read = x.new_zeros(K, V), []
            for s in range(len(x)):
                rate, slow = rates[s, head, :, value]
                decay = (1 + (slow + own["self_attn.dt_bias"][place]).exp()).log()
                state = state * (-own["self_attn.A_log"][place].exp() * decay).exp()
                key = k[s] / (k[s].dot(k[s]) + 1e-6).sqrt()
                query = q[s] / (q[s].dot(q[s]) + 1e-6).sqrt() / math.sqrt(K)
                wanted = v[s, value * V : (value + 1) * V] - key @ state
                state = state + key[:, None] * wanted / (1 + (-rate).exp())
                read.append(query @ state)
            plain = replace(model, apply_layernorm_1p=False)
            gate = projected[:, head, mixed + value * V : mixed + (value + 1) * V]
            normed = _norm(plain, own, "self_attn.norm", torch.stack(read))
            outputs.append(normed * _silu(gate))
    return _linear(own, "self_attn.out_proj", torch.cat(outputs, dim=1))


def _kimi_delta(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """Kimi Delta Attention, token by token."""
    K, V, heads = model.linear_key_head_dim, model.linear_value_head_dim, model.linear_num_key_heads
    mixed = _linear(own, "self_attn.in_proj_qkv", x).unflatten(1, (heads, -1))
    learn = _linear(own, "self_attn.b_proj", x)
    low = {each: _linear(own, f"self_attn.{each}_a_proj", x) for each in "fg"}
    slow, gate = (_linear(own, f"self_attn.{each}_b_proj", low[each]) for each in "fg")
    taps = own["self_attn.conv1d.weight"][:, 0].unflatten(0, (heads, -1))
    outputs = []
    for head in range(heads):
        features = slice(head * K, (head + 1) * K)
        state, read = x.new_zeros(K, V), []
        for s in range(len(x)):
            reach = range(min(model.linear_conv_kernel_dim, s + 1))
            terms = [mixed[s - j, head] * taps[head, :, -1 - j] for j in reach]
            q, k, v = _silu(torch.stack(terms).sum(0)).split([K, K, V])
            sums = slow[s, features] + own["self_attn.dt_bias"][features]
            decay = own["self_attn.A_log"][head].exp() * (1 + sums.exp()).log()
            state = state * (-decay).exp()[:, None]
            key = k / (k.dot(k) + 1e-6).sqrt()
            query = q / (q.dot(q) + 1e-6).sqrt() / math.sqrt(K)
            wrong = v - key @ state
            state = state + key[:, None] * wrong / (1 + (-learn[s, head]).exp())
            read.append(query @ state)
        plain = replace(model, apply_layernorm_1p=False)
        normed = _norm(plain, own, "self_attn.norm", torch.stack(read))
        outputs.append(normed / (1 + (-gate[:, head * V : (head + 1) * V]).exp()))
    return _linear(own, "self_attn.out_proj", torch.cat(outputs, dim=1))


def _short_convolution(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """A gated short convolution, token by token."""
    groups, rows = model.num_attention_heads, []
    both = _linear(own, "self_attn.in_proj_xc", x).unflatten(1, (groups, 2, -1))
    mixed = both[:, :, 0].flatten(1) * _linear(own, "self_attn.in_proj_b", x)
    taps = own["self_attn.conv1d.weight"][:, 0]
    for s in range(len(x)):
        reach = range(min(model.linear_conv_kernel_dim, s + 1))
        made = torch.stack([mixed[s - j] * taps[:, -1 - j] for j in reach]).sum(0)
        rows.append(made * both[s, :, 1].flatten())
    return _linear(own, "self_attn.out_proj", torch.stack(rows))


def _mamba(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """Mamba-2, token by token."""
    K, V, groups = model.mamba_state_dim, model.mamba_head_dim, model.mamba_num_groups
    heads = model.mamba_num_heads or 2 * model.hidden_size // V
    shared = heads // groups
    mixed, outputs = shared * V + 2 * K, []
    projected = _linear(own, "self_attn.in_proj_xbcz", x).unflatten(1, (groups, -1))
    steps = _linear(own, "self_attn.in_proj_dt", x)
    taps = own["self_attn.conv1d.weight"][:, 0].unflatten(0, (groups, mixed))
    bias = own["self_attn.conv1d.bias"].unflatten(0, (groups, mixed))
    for group in range(groups):
        rows = []
        for s in range(len(x)):
            reach = range(min(4, s + 1))
            terms = [projected[s - j, group, :mixed] * taps[group, :, -1 - j] for j in reach]
            rows.append(_silu(torch.stack(terms).sum(0) + bias[group]))
        values, b, c = torch.stack(rows).split([shared * V, K, K], dim=1)
        read = torch.zeros_like(values)
        for value in range(shared):
            head, of_head = group * shared + value, slice(value * V, (value + 1) * V)
            state = x.new_zeros(K, V)
            for s in range(len(x)):
                step = (1 + (steps[s, head] + own["self_attn.dt_bias"][head]).exp()).log()
                state = state * (-own["self_attn.A_log"][head].exp() * step).exp()
                state = state + b[s][:, None] * values[s, of_head] * step
                skipped = own["self_attn.D"][head] * values[s, of_head]
                read[s, of_head] = c[s] @ state + skipped
        gated = read * _silu(projected[:, group, mixed:])
        plain = replace(model, apply_layernorm_1p=False)
        scale = own["self_attn.norm.weight"].unflatten(0, (groups, -1))[group]
        outputs.append(_norm(plain, {"norm.weight": scale}, "norm", gated))
    return _linear(own, "self_attn.out_proj", torch.cat(outputs, dim=1))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


Head = tuple[Tensor, Tensor, Tensor, float]  # queries, keys, values, factor of the scores


def _plain_heads(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Iterator[Head]:
    D, shared = model.head_dim, model.num_attention_heads // model.num_kv_heads
    names = "qkk" if model.keys_as_values else "qkv"
    q, k, v = (_linear(own, f"self_attn.{name}_proj", x) for name in names)
    if model.attention_output_gate:
        q = q.unflatten(1, (-1, 2, D))[:, :, 0].flatten(1)
    if model.qk_layernorm_type == "all_heads":
        q, k = _norm(model, own, "self_attn.q_norm", q), _norm(model, own, "self_attn.k_norm", k)
    most = model.clip_qkv or math.inf
    q, k, v = (y.clamp(-most, most) for y in (q, k, v))
    for head in range(model.num_attention_heads):
        group = head // shared
        q_SD = q[:, head * D : (head + 1) * D]
        V = model.v_channels or D
        k_SD = k[:, group * D : (group + 1) * D]
        v_SD = v[:, group * V : (group + 1) * V] * model.value_multiplier
        v_SD = _unit(model, v_SD) if model.v_l2_norm else v_SD
        after = model.qk_layernorm_after_rope
        if model.qk_layernorm_type == "per_head" and not after:
            q_SD = _norm(model, own, "self_attn.q_norm", q_SD)
            k_SD = _norm(model, own, "self_attn.k_norm", k_SD)
        if model.position_embedding_type == "rope":
            q_SD, k_SD = _rope(model, q_SD), _rope(model, k_SD)
            if model.qk_l2_norm:
                q_SD, k_SD = (_unit(model, y) for y in (q_SD, k_SD))
        turned = model.position_embedding_type == "rope"
        if model.attn_temperature_tuning and turned == model.attn_temperature_rotated:
            q_SD = _tempered(model, q_SD, 0 if turned else 1)
        if after:
            q_SD = _norm(model, own, "self_attn.q_norm", q_SD)
            k_SD = _norm(model, own, "self_attn.k_norm", k_SD)
        yield q_SD, k_SD, v_SD, model.softmax_scale or 1 / math.sqrt(D)


def _tempered(model: ModelConfig, q_SD: Tensor, first: int) -> Tensor:
    """Queries that get hotter with the position, whose first number is `first`."""
    steps = [math.floor((s + first) / model.floor_scale) for s in range(len(q_SD))]
    factors = [1 + model.attn_scale * math.log(1 + step) for step in steps]
    return q_SD * torch.tensor(factors, dtype=q_SD.dtype)[:, None]


def _latent_heads(model: ModelConfig, own: dict[str, Tensor], x: Tensor) -> Iterator[Head]:
    rank, D, R, V = (
        *(model.kv_lora_rank, model.qk_head_dim),
        *(model.qk_pos_emb_head_dim, model.v_head_dim),
    )
    if model.q_lora_rank is None:
        q = _linear(own, "self_attn.q_proj", x)
    else:
        low = _norm(model, own, "self_attn.q_a_layernorm", _linear(own, "self_attn.q_a_proj", x))
        q = _linear(own, "self_attn.q_b_proj", low)
    both = _linear(own, "self_attn.kv_a_proj", x)
    turn = _rope if model.position_embedding_type == "rope" else _as_it_is
    latent, shared = both[:, :rank], turn(model, both[:, rank:])
    kv = _linear(own, "self_attn.kv_b_proj", _norm(model, own, "self_attn.kv_a_layernorm", latent))
    scale = model.softmax_scale or 1 / math.sqrt(D + R)
    if model.rope_type == "yarn":
        scale *= _growth(model, model.mscale_all_dim) ** 2
    for head in range(model.num_attention_heads):
        q_SD = q[:, head * (D + R) : (head + 1) * (D + R)]
        kv_SD = kv[:, head * (D + V) : (head + 1) * (D + V)]
        turned = torch.cat((q_SD[:, :D], turn(model, q_SD[:, D:])), dim=1)
        if model.attn_temperature_tuning:
            turned = _tempered(model, turned, 0)
        yield turned, torch.cat((kv_SD[:, :D], shared), dim=1), kv_SD[:, D:], scale


def _as_it_is(_: ModelConfig, x_SR: Tensor) -> Tensor:
    return x_SR


def _rope(model: ModelConfig, x_SR: Tensor) -> Tensor:
    half = model.rotary_dim // 2
    turning = int(half * model.rotary_percent) if model.rope_type == "proportional" else half
    turned = x_SR.clone()
    scale = 1.0
    if model.rope_type == "longrope":
        original, factor = model.original_max_position_embeddings, model.longrope_attention_factor
        growth = model.max_position_embeddings / original
        scale = factor or (1 + math.log(growth, original)) ** 0.5
    if model.rope_type == "yarn":
        scale = _growth(model, model.mscale) / _growth(model, model.mscale_all_dim)
    for position in range(len(x_SR)):
        for i in range(turning):
            turn = scale * cmath.exp(1j * position * reference_frequency(model, i))
            one, other = (2 * i, 2 * i + 1) if model.rotary_interleaved else (i, i + half)
            pair = complex(x_SR[position, one], x_SR[position, other]) * turn
            turned[position, one], turned[position, other] = pair.real, pair.imag
    return turned


def _growth(model: ModelConfig, share: float) -> float:
    return 0.1 * share * math.log(model.rotary_scaling_factor) + 1.0


def _yarn_frequency(model: ModelConfig, i: int, frequency: float) -> float:
    """With the search for the ends of the ramp of the published code."""
    length, features = model.original_max_position_embeddings, model.rotary_dim

    def place(turns: float) -> float:
        top = features * math.log(length / (turns * 2 * math.pi))
        return top / (2 * math.log(model.rotary_base))

    low = max(math.floor(place(model.beta_fast)), 0)
    high = min(math.ceil(place(model.beta_slow)), features - 1)
    ramp = min(max((i - low) / (high - low if high > low else 0.001), 0.0), 1.0)
    return frequency / model.rotary_scaling_factor * ramp + frequency * (1 - ramp)


def reference_frequency(model: ModelConfig, i: int) -> float:
    """RoPE's angle per position, with the case distinction of Llama 3.1's published code."""
    frequency = 1.0 / model.rotary_base ** (2 * i / model.rotary_dim)
    frequency /= model.rotary_seq_len_interpolation_factor or 1.0
    if model.rope_type == "yarn":
        return _yarn_frequency(model, i, frequency)
    if model.rope_type == "longrope":  # in rows that are not longer than the original length
        return frequency / model.longrope_short_factor[i]
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
