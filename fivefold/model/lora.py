"""Low-rank adapters (LoRA, Hu et al. 2021): beside a frozen W, a B A of small rank is trained.

y = W x + s B A x. A and B are linear layers of their own, so that each is split, gathered and
summed as any other: beside a column-parallel W, A is whole and B is column-parallel; beside a
row-parallel one, A is row-parallel and B is whole. Names are those of PEFT. With magnitudes it is
DoRA (`model.dora`).
"""

from collections.abc import Iterator

from torch import nn

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


def _linears(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linear layers of attention and MLPs, by their names there."""
    for block in module.modules():
        if isinstance(block, LayerBlock):
            for name, child in block.named_children():
                if isinstance(child, Linear):
                    yield name, child
