"""megatron-core's layers by its local spec, which is what it has without Transformer Engine.

Attention is PyTorch's fused one, and RMSNorm PyTorch's. Its `torch.compile` decorators are off
(TORCHDYNAMO_DISABLE=1). Tensor parallelism is with sequence parallelism.
"""

import sys

import torch
from torch import Tensor

from benchmarks.host_systems.common import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    NORM_EPSILON,
    ROPE_BASE,
    SEQ,
    Layers,
    Place,
    serve,
)

if sys.argv[2] == "cpu":
    from benchmarks.peer_systems import megatron_cpu  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from benchmarks.peer_systems.megatron_parts import LLAMA, llama_layers


def build(place: Place) -> Layers:
    tp, device, dtype = place
    parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        ffn_hidden_size=FFN,
        layernorm_epsilon=NORM_EPSILON,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        **LLAMA,
    )
    gpt = GPTModel(
        config, llama_layers(), 64, SEQ, position_embedding_type="rope", rotary_base=ROPE_BASE
    )
    gpt.to(device, dtype)
    rotary = gpt.rotary_pos_emb(SEQ)
    layers = list(gpt.decoder.layers)

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x, _ = layer(x, attention_mask=None, rotary_pos_emb=rotary)
        return x

    return Layers(forward, (SEQ // tp, 1, HIDDEN), layers)


if __name__ == "__main__":
    serve(build)
