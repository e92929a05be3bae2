"""torchtitan's Llama 3 blocks, sharded by its own tensor parallelism (DTensors).

Its language models attend by FlexAttention or FlashAttention's variable lengths, of which neither
runs on a CPU; here it is the wrapper of PyTorch's fused attention that it keeps for its other
models. Tensor parallelism is with sequence parallelism, its default.
"""

from contextlib import ExitStack

from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from benchmarks.host_systems.common import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    ROPE_BASE,
    SEQ,
    Layers,
    Place,
    serve,
)

_RUNNING = ExitStack()  # its meshes, known to the end of the process


def build(place: Place) -> Layers:
    tp, device, dtype = place
    config = Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=64,
        tok_embeddings=Embedding.Config(num_embeddings=64, embedding_dim=HIDDEN),
        norm=RMSNorm.Config(normalized_shape=HIDDEN),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=64),
        layers=_build_llama3_layers(
            n_layers=LAYERS,
            dim=HIDDEN,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            hidden_dim=FFN,
            rope=ComplexRoPE.Config(dim=HIDDEN // HEADS, max_seq_len=SEQ, theta=ROPE_BASE),
            attn_backend="varlen",
        ),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if tp > 1:
        set_llama3_sharding_config(config, enable_sp=True)
    model = config.build().to(device, dtype)
    blocks = list(model.layers.values())
    if tp > 1:
        dims = ParallelDims(1, 1, 1, tp, 1, 1, tp)
        _RUNNING.enter_context(get_spmd_context(parallel_dims=dims)())
        for block in blocks:
            block.parallelize(dims)

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, None)
        return x

    return Layers(forward, (1, SEQ // tp, HIDDEN), blocks)


if __name__ == "__main__":
    serve(build)
