"""Small models and batches for the tests of this room."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.config.training import TrainingConfig
from fivefold.description.shape import ModelParts
from fivefold.model.batch import Batch
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage

LLAMA = replace(
    PRESETS["debug-llama"],
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=12,
    ffn_hidden_size=40,
    vocab_size=100,
    rotary_base=500.0,
    use_rope_scaling=True,
    rope_original_max_position_embeddings=16,
    init_method_std=0.3,
)
QWEN = replace(
    LLAMA,
    qk_layernorm=True,
    add_qkv_bias=True,
    use_rope_scaling=False,
    norm_placement="both",
    apply_layernorm_1p=True,
)
LONG = replace(
    LLAMA,
    use_rope_scaling=False,
    rope_type="longrope",
    rotary_percent=0.5,
    original_max_position_embeddings=64,
    max_position_embeddings=640,
    longrope_short_factor=(1.0, 1.2, 1.7),
    longrope_long_factor=(1.4, 3.0, 7.0),
    qk_layernorm=True,
    qk_layernorm_after_rope=True,
    attn_temperature_tuning=True,
    attn_temperature_rotated=True,
    attn_scale=0.4,
    floor_scale=2,
    gated_linear_unit=False,
    activation_func="xielu",
)
GPT = replace(
    PRESETS["debug-gpt"],
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=100,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.3,
)
LATENT = replace(
    LLAMA,
    num_query_groups=None,
    kv_channels=None,
    use_rope_scaling=False,
    multi_latent_attention=True,
    q_lora_rank=20,
    kv_lora_rank=14,
    qk_head_dim=10,
    qk_pos_emb_head_dim=6,
    v_head_dim=12,
    rope_type="yarn",
    original_max_position_embeddings=8,
    mscale=0.7,
    latent_norm_epsilon=0.3,
    softmax_scale=0.4,
    attn_logit_softcapping=0.9,
    final_logit_softcapping=1.3,
    mscale_all_dim=1.1,
)
PLAIN_QUERIES = replace(
    LATENT,
    q_lora_rank=None,
    add_bias_linear=True,
    rope_type="rope",
    original_max_position_embeddings=4096,
    mscale=1.0,
    mscale_all_dim=0.0,
    attn_temperature_tuning=True,
    attn_temperature_rotated=True,
    attn_scale=0.4,
    floor_scale=2,
)
SPARSE = replace(
    LATENT,
    attn_logit_softcapping=None,
    experimental_attention_variant="dsa",
    dsa_indexer_n_heads=3,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=5,
    dsa_indexer_loss_coeff=0.6,
)
SINKS = replace(
    LLAMA,
    norm_placement="after",
    qk_layernorm=True,
    qk_layernorm_type="all_heads",
    embedding_multiplier=3.0,
    residual_multiplier=0.3,
    logits_scaling=3.0,
    softmax_scale=0.4,
    attn_logit_softcapping=0.7,
    final_logit_softcapping=1.1,
    rotary_base_local=20.0,
    add_bias_linear=True,
    softmax_type="learnable",
    activation_func="quick_gelu",
    glu_linear_offset=1.0,
    activation_func_clamp_value=0.4,
    window_size=3,
    window_attn_skip_freq="2",
)
LOCAL = replace(
    LLAMA,
    qk_layernorm=True,
    v_channels=7,
    value_multiplier=0.6,
    window_size=3,
    window_attn_skip_freq="2",
    num_query_groups_local=1,
    kv_channels_local=10,
    softmax_type_local="learnable",
)
WHOLE = replace(
    LLAMA,
    qk_layernorm=True,
    use_rope_scaling=False,
    rope_type="proportional",
    rotary_percent=0.5,
    rotary_base_local=20.0,
    window_size=3,
    window_attn_skip_freq="3",
    kv_channels_local=8,
    num_query_groups_local=4,
    keys_as_values=True,
    v_l2_norm=True,
    layer_scalar=0.75,
)
NEOX = replace(
    GPT,
    apply_layernorm_1p=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
    rotary_interleaved=True,
    rotary_seq_len_interpolation_factor=2.5,
    no_rope_freq="2",
    residual_multiplier=0.6,
    parallel_residual=True,
    activation_func="squared_relu",
)
COMMAND = replace(
    NEOX, layernorm_bias=False, parallel_residual_one_norm=True, apply_layernorm_1p=False
)
BARE = replace(
    LLAMA,
    norm_elementwise_affine=False,
    embed_layernorm=True,
    clip_qkv=0.6,
    qk_l2_norm=True,
    lm_head_bias=True,
)
PHI = replace(
    COMMAND,
    add_bias_linear=False,
    attention_out_bias=True,
    mlp_bias=True,
    lm_head_bias=True,
    embed_layernorm=True,
    clip_qkv=0.5,
    qk_layernorm=True,
    qk_layernorm_type="all_heads",
    untie_embeddings_and_output_weights=True,
)
CHUNKED = replace(
    LLAMA,
    qk_l2_norm=True,
    attention_chunk_size=5,
    no_rope_freq="2",
    attn_temperature_tuning=True,
    attn_scale=0.3,
    floor_scale=3,
)
DELTA = replace(
    LLAMA,
    use_rope_scaling=False,
    rotary_percent=0.5,
    qk_layernorm=True,
    apply_layernorm_1p=True,
    attention_output_gate=True,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="2",
    linear_conv_kernel_dim=3,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
)
KIMI = replace(
    LLAMA,
    num_query_groups=None,
    kv_channels=None,
    use_rope_scaling=False,
    position_embedding_type="none",
    rotary_base=10000.0,
    multi_latent_attention=True,
    q_lora_rank=None,
    kv_lora_rank=14,
    qk_head_dim=10,
    qk_pos_emb_head_dim=5,
    v_head_dim=12,
    apply_layernorm_1p=True,
    experimental_attention_variant="kimi_delta_attention",
    linear_attention_freq="2",
    linear_conv_kernel_dim=3,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
)
CONVOLVING = replace(
    LLAMA,
    use_rope_scaling=False,
    qk_layernorm=True,
    experimental_attention_variant="short_convolution",
    linear_attention_freq="2",
    linear_conv_kernel_dim=3,
)
HYBRID = replace(
    LLAMA,
    hybrid_override_pattern="M*-",
    use_rope_scaling=False,
    position_embedding_type="none",
    rotary_base=10000.0,
    activation_func="squared_relu",
    gated_linear_unit=False,
    mamba_state_dim=6,
    mamba_head_dim=5,
    mamba_num_groups=2,
    mamba_num_heads=6,
)
OPT = replace(
    GPT,
    activation_func="relu",
    position_embedding_offset=2,
    window_size=3,
    window_attn_skip_freq="2",
    softmax_scale=1.0,
)
FAMILIES = {
    "delta": DELTA,
    "kimi": KIMI,
    "convolving": CONVOLVING,
    "hybrid": HYBRID,
    "command": COMMAND,
    "bare": BARE,
    "phi": PHI,
    "local": LOCAL,
    "whole": WHOLE,
    "sinks": SINKS,
    "chunked": CHUNKED,
    "neox": NEOX,
    "llama": LLAMA,
    "qwen": QWEN,
    "long": LONG,
    "gpt": GPT,
    "opt": OPT,
    "latent": LATENT,
    "latent, plain queries": PLAIN_QUERIES,
    "sparse": SPARSE,
}
TO_ALL = {name: model for name, model in FAMILIES.items() if not model.is_sparse}
"""Those in which attention is to all tokens that a query sees; for others see test_indexer.py."""


def build(model: ModelConfig, parts: ModelParts | None = None, **options: Any) -> Stage:
    """An fp64 stage of which every parameter, norms and biases too, is worth checking."""
    stage = Stage(model, parts, TrainingConfig(seq_length=1, **options)).double()
    initialise(stage, seed=7)
    for name, parameter in stage.named_parameters():
        if parameter.dim() == 1:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.add_(0.2 * noise)
    return stage


def batch_of(model: ModelConfig, documents: Sequence[Sequence[int]], seed: int = 0) -> Batch:
    """A batch of one row per list of document lengths; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(documents), sum(documents[0]))
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    labels = torch.randint(model.vocab_size, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = -100
    rows = [[(i, s) for i, n in enumerate(row) for s in range(n)] for row in documents]
    both = torch.tensor(rows)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=both[:, :, 1],
        documents=both[:, :, 0],
        token_ids=torch.arange(tokens.numel()).view(shape),
        loss_weights=torch.rand(shape, generator=generator, dtype=torch.float64),
    )
