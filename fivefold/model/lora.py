"""Low-rank adapters (LoRA, Hu et al. 2021): beside a frozen W, a B A of small rank is trained.

y = W x + s B A x. A and B are linear layers of their own, so that each is split, gathered and
summed as any other: beside a column-parallel W, A is whole and B is column-parallel; beside a
row-parallel one, A is row-parallel and B is whole. Names are those of PEFT. With magnitudes it is
DoRA (`model.dora`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.model.layers import LayerBlock, Linear

MAGNITUDE = ".lora_magnitude_vector"
LORA = ".lora_"
"""Found in the names of all parameters of adapters, and in no others."""


def add_adapters(module: nn.Module, model: ModelConfig) -> tuple[str, ...]:
    """Give adapters to the linear layers that `model` names, if any, and freeze all else.

    Returns:
        The names of these linear layers within attention and MLPs.
    """
    if model.lora_rank is None:
        return ()
    adapted = [(name, linear) for name, linear in _linears(module) if model.adapts(name)]
    for name, linear in adapted:
        linear.adapt(name, model.lora_rank, model.lora_scale, magnitudes=model.use_dora)
    freeze(module, model)
    return tuple(name for name, _ in adapted)


def freeze(module: nn.Module, model: ModelConfig) -> None:
    """Freeze all parameters but those of adapters, if `model` has some."""
    if model.trains_all:
        return
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(LORA in name)


def as_if_trained(x_TH: Tensor) -> Tensor:
    """The output of a frozen embedding, marked as trained, so that every layer saves the same
    tensors."""
    if x_TH.requires_grad or not torch.is_grad_enabled():
        return x_TH
    return _AsIfTrained.apply(x_TH, x_TH.new_empty(0, requires_grad=True))


class _AsIfTrained(torch.autograd.Function):
    """Not a leaf, since autograd would keep a leaf's memory for its gradient, and the gradient
    itself."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, trained: Tensor) -> Tensor:
        return x_TH.detach()  # not a view, about which FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


def _linears(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linear layers of attention and MLPs, by their names there."""
    for block in module.modules():
        if isinstance(block, LayerBlock):
            for name, child in block.named_children():
                if isinstance(child, Linear):
                    yield name, child
