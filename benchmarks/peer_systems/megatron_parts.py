"""PyTorch's fused attention and RMSNorm in the places that Transformer Engine's have on a GPU."""

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor


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
