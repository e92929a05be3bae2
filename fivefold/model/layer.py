"""One layer of the transformer: attention and MLP with the norms around them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fivefold.config.experts import ExpertsConfig
from fivefold.config.model import ModelConfig
from fivefold.description.kinds import layer_kind
from fivefold.mesh.device import runs_triton
from fivefold.model.attention.grouped_query import Attention, AttentionBlock
from fivefold.model.attention.latent import LatentAttention
from fivefold.model.context import Context
from fivefold.model.dropout import Dropout, HiddenDropout, LayerDropout
from fivefold.model.layers import LayerBlock
from fivefold.model.linear_attention.gated_delta_net import GatedDeltaNet
from fivefold.model.linear_attention.kimi_delta import KimiDeltaAttention
from fivefold.model.linear_attention.mamba import Mamba
from fivefold.model.linear_attention.short_convolution import ShortConvolution
from fivefold.model.linear_attention.state_layer import StateLayer
from fivefold.model.lora import add_adapters
from fivefold.model.mlp import MLP
from fivefold.model.moe.layer import MoE
from fivefold.model.norms import RMSNorm, make_norm
from fivefold.model.scalar import times

Norm = Callable[[Tensor], Tensor]


class NormedBlock(Protocol):
    """Runs a norm and the module after it; `rest` are further arguments of the module."""

    def __call__(self, norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
        """[T, H] -> [T, H]."""


def plain_block(norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
    """Norm, then module; replaced when the norm's output is recomputed."""
    made_TH: Tensor = module(norm(x_TH), *rest)
    return made_TH


def make_attention(model: ModelConfig, layer: int) -> AttentionBlock | StateLayer | None:
    """The model's kind of attention for one layer; None if the layer has no attention."""
    kind = layer_kind(model, layer)
    if not kind.attends:
        return None
    if kind.linear:
        if kind.mixer is not None:
            return Mamba(model, layer)
        if model.experimental_attention_variant == "short_convolution":
            return ShortConvolution(model, layer)
        return (KimiDeltaAttention if model.fades_features else GatedDeltaNet)(model, layer)
    return (LatentAttention if model.multi_latent_attention else Attention)(model, layer)


def make_mlp(model: ModelConfig, layer: int, experts: ExpertsConfig) -> MLP | MoE | None:
    """The dense MLP or mixture of experts of one layer; None if it has neither."""
    kind = layer_kind(model, layer)
    if not kind.mlp:
        return None
    if kind.experts:
        return MoE(model, layer, experts)
    return MLP(model, model.ffn_size)


class TransformerLayer(nn.Module):
    """Attention and MLP, each after a norm, or before one, and added to the residual stream; or one
    of both alone.

    Attributes:
        block: seam around a norm and the module after it.
        fuses_norm: as in `model.fusions`.
        wide: whether its linear layers keep bf16 where those of others have 8 bits.
        layer_scalar: [1], what its result is multiplied by; None: it is not.
    """

    def __init__(self, model: ModelConfig, layer: int, experts: ExpertsConfig) -> None:
        super().__init__()
        before, after = model.norms_before, model.norms_after
        kind = layer_kind(model, layer)
        self.input_layernorm = make_norm(model) if before and kind.attends else nn.Identity()
        self.self_attn = make_attention(model, layer)
        self.post_self_attn_layernorm = make_norm(model) if after and kind.attends else None
        inside = kind.experts and model.moe_branch_norms
        own = before and kind.mlp and not (model.parallel_residual_one_norm or inside)
        self.post_attention_layernorm = make_norm(model) if own else nn.Identity()
        self.mlp = make_mlp(model, layer, experts)
        self.post_mlp_layernorm = make_norm(model) if after and kind.mlp else None
        self.dropout, self.scale = model.hidden_dropout, model.residual_multiplier
        self.side_by_side = model.parallel_residual
        self.one_norm = model.parallel_residual_one_norm
        self.site = f"layers.{layer}"
        self.adapted, self.lora_dropout = add_adapters(self, model), model.lora_dropout
        self.block: NormedBlock = plain_block
        self.fuses_norm, self.wide = False, kind.wide
        scalar = None if model.layer_scalar is None else torch.full((1,), model.layer_scalar)
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", scalar)

    @property
    def norm_before_mlp(self) -> nn.Module:
        """The block that makes the MLP's input. If attention and MLP share one norm, the norm runs
        twice, so that whatever wraps a norm and its module wraps each of the two alone."""
        return self.input_layernorm if self.one_norm else self.post_attention_layernorm

    @property
    def mixers(self) -> list[LayerBlock]:
        """Its attention and its MLP, or the one that it has."""
        return [each for each in (self.self_attn, self.mlp) if each is not None]

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        if context.dropout is not None:
            context = replace(context, layer=self._dropout(context.dropout))
        made_TH = self.run(x_TH, context)
        return made_TH if self.layer_scalar is None else times(made_TH, self.layer_scalar)

    def run(self, x_TH: Tensor, context: Context) -> Tensor:
        """`forward` without what differs by name between layers; compiled once for all layers."""
        self_attn, drop = self.self_attn, context.layer
        if self_attn is None:
            return self._fed(x_TH, x_TH, context)
        attended_TH = self.block(self.input_layernorm, self_attn, x_TH, context)
        attended_TH = _normed(self.post_self_attn_layernorm, attended_TH)
        norm = self._joined_norm(x_TH)
        if norm is not None and self.mlp is not None:
            sum_TH, normed_TH = norm.of_sum(attended_TH, x_TH, self.scale)
            made_TH = _normed(self.post_mlp_layernorm, self.mlp(normed_TH, context))
            return self._added(sum_TH, made_TH, drop.made)
        sum_TH = self._added(x_TH, attended_TH, drop.attended)
        return self._fed(x_TH if self.side_by_side else sum_TH, sum_TH, context)

    def _fed(self, read_TH: Tensor, sum_TH: Tensor, context: Context) -> Tensor:
        """The residual stream after the MLP, which reads `read_TH`; unchanged if there is no
        MLP."""
        mlp = self.mlp
        if mlp is None:
            return sum_TH
        made_TH = self.block(self.norm_before_mlp, mlp, read_TH, context)
        return self._added(sum_TH, _normed(self.post_mlp_layernorm, made_TH), context.layer.made)

    def _added(self, sum_TH: Tensor, x_TH: Tensor, drop: HiddenDropout | None) -> Tensor:
        if drop is None or not self.dropout:
            return torch.add(sum_TH, x_TH, alpha=self.scale)
        return drop(x_TH, self.dropout, sum_TH, self.scale)

    def _joined_norm(self, x_TH: Tensor) -> RMSNorm | None:
        """The norm before the MLP, if one kernel can also compute the sum that it normalises.

        None where a block recomputes the norm from that sum, or moves it.
        """
        norm = self.norm_before_mlp
        joined = self.fuses_norm and self.block is plain_block and runs_triton(x_TH)
        return norm if joined and isinstance(norm, RMSNorm) else None

    def _dropout(self, dropout: Dropout) -> LayerDropout:
        heads = None if self.self_attn is None else self.self_attn.head_dropout(dropout)
        adapters = dropout.of_adapters(self.site, self.adapted, self.lora_dropout)
        if not self.dropout:
            return LayerDropout(heads=heads, adapters=adapters)
        attended, made = (dropout.at(f"{self.site}.{after}") for after in ("self_attn", "mlp"))
        return LayerDropout(attended, made, heads, adapters)


def _normed(norm: Norm | None, x_TH: Tensor) -> Tensor:
    return x_TH if norm is None else norm(x_TH)
