"""A Llama of megatron-core without Transformer Engine.

PyTorch's fused attention and RMSNorm have the places that Transformer Engine's have on a GPU.
"""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

# Settings of a `TransformerConfig`, beside its sizes and how it is split.
LLAMA = MappingProxyType(
    {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "use_cpu_initialization": True,
    }
)


def rms_norm(_, config: TransformerConfig, hidden_size: int, eps: float, **__) -> torch.nn.RMSNorm:
    """What WrappedTorchNorm makes, marked so that its gradient is summed under SP."""
    norm = torch.nn.RMSNorm(hidden_size, eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


WrappedTorchNorm.__new__ = rms_norm


class FlashAttention(torch.nn.Module):
    """PyTorch's fused causal attention, in the place that Transformer Engine's has on a GPU."""

    def __init__(self, *_, **__) -> None:
        super().__init__()

    def forward(self, q_SBND: Tensor, k_SBND: Tensor, v_SBND: Tensor, *_, **__) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBND, v_SBND))
        out_BNSD = F.scaled_dot_product_attention(
            q_BNSD, k_BNSD, v_BNSD, is_causal=True, enable_gqa=q_BNSD.shape[1] != k_BNSD.shape[1]
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)


def llama_layers(num_experts: int | None = None) -> ModuleSpec:
    """Its local layers, with the fused attention."""
    layers = get_gpt_layer_local_spec(num_experts=num_experts, normalization="RMSNorm")
    layers.submodules.self_attention.submodules.core_attention = FlashAttention
    return layers
