"""Common misspellings of choices, for suggestions in messages."""

from collections.abc import Mapping
from types import MappingProxyType

MEANT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "precision": {
            **dict.fromkeys(("bfloat16", "bf16_mixed"), "bf16"),
            **dict.fromkeys(("float16", "half", "16", "16_mixed", "fp16_mixed"), "fp16"),
            **dict.fromkeys(("float32", "float", "single", "tf32", "32"), "fp32"),
            **dict.fromkeys(("float64", "double", "64"), "fp64"),
        },
        "data_parallel_sharding_strategy": {
            **dict.fromkeys(("0", "ddp", "none", "zero0"), "no_shard"),
            **dict.fromkeys(("1", "zero1", "zero_1"), "optim"),
            **dict.fromkeys(("2", "zero2", "zero_2", "shard_grad_op"), "optim_grads"),
            **dict.fromkeys(("3", "zero3", "zero_3", "fsdp", "full_shard"), "optim_grads_params"),
        },
        "activation_func": {
            **dict.fromkeys(("swish", "swiglu"), "silu"),
            **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
            "geglu": "gelu",
            "relu2": "squared_relu",
        },
        "position_embedding_type": {"rotary": "rope", "learned": "learned_absolute"},
        "normalization": {"rms": "RMSNorm", "ln": "LayerNorm"},
        "pipeline_schedule": {
            "interleaved": "interleaved_1f1b",
            **dict.fromkeys(("zb", "zero_bubble", "zerobubble"), "zb_h1"),
            "zbv": "zb_v",
            "bfs": "looped_bfs",
            **dict.fromkeys(("synthesised", "synthesized", "searched", "automatic"), "auto"),
        },
        "cp_comm_type": {"ring": "p2p", "ulysses": "a2a", "hierarchical": "a2a+p2p"},
        "lr_decay_style": {"cosine_with_restarts": "cosine", "warmup_stable_decay": "WSD"},
        "recompute_granularity": {"block": "full", "uniform": "full", "modules": "selective"},
    }
)
"""The intended choice for each misspelling, by setting."""
