"""Chooses and installs the 8-bit linear layers of a stage."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.training import TrainingConfig
from fivefold.model.attention.indexer import Indexer
from fivefold.model.eight_bit.delayed import DelayedScaling
from fivefold.model.eight_bit.fp8 import OF_GRADIENTS, RECIPES
from fivefold.model.eight_bit.groups import EightBitExperts
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.eight_bit.rules import ScaledLayer, delayed_linears, keeps_weights
from fivefold.model.eight_bit.step_weights import StepWeights
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.moe.grouped import GroupedLinear
from fivefold.model.moe.layer import MoE
from fivefold.model.places import placed_layers
from fivefold.model.transformer import Stage

log = logging.getLogger(__name__)


def eight_bit(training: TrainingConfig, dtype: torch.dtype) -> EightBit | None:
    """The products that --fp8-format and --fp8-recipe ask for; None: those of the dtype.

    They still scale by an operand's own largest element where scales are to be delayed, until
    `install_delayed`.
    """
    if training.fp8_format is None:
        return None
    recipe = "tensorwise" if training.delays_scales else training.fp8_recipe
    return EightBit(RECIPES[recipe], dtype, OF_GRADIENTS[training.fp8_format])


def install_eight_bit(stage: Stage, products: EightBit, memory: MemoryConfig) -> None:
    """Put products in the seams of every linear layer of a stage's blocks, as Megatron-LM does.

    Routers, indexers, gates of shared experts, the output layer and wide layers keep the dtype.

    Args:
        stage: stage whose parameters may still be on the meta device.
        products: the products.
        memory: settings of the stage. Linear layers that read what recomputation discards keep
            nothing else of it.
    """
    again = replace(products, keeps_input=True)
    for place, layer in placed_layers(stage):
        if layer.wide:
            continue
        recomputed = memory.of_layer(place).recomputed_modules
        after_norm = again if "layernorm" in recomputed else products
        for block in (module for module in layer.modules() if isinstance(module, LayerBlock)):
            if isinstance(block, Indexer):
                continue
            for name, linear in block.named_children():
                if isinstance(linear, Linear) and name != "shared_expert_gate":
                    linear.multiply = products if name in _NOT_AFTER_THE_NORM else after_norm
        if isinstance(layer.mlp, MoE):
            for grouped in layer.mlp.experts.into:
                grouped.products = EightBitExperts(products)
            after_act = again if "moe_act" in recomputed else products
            layer.mlp.experts.down_proj.products = EightBitExperts(after_act)
    for prediction in stage.predictions:
        prediction.eh_proj.multiply = products


def keep_weights(stages: Mapping[int, Stage], config: Config, passes: int) -> StepWeights:
    """Make the 8-bit linear layers of stages keep quantised weights for a step, if it reads them
    repeatedly.

    Args:
        stages: stages whose linear layers multiply in 8 bits, if they do.
        config: the configuration.
        passes: forwards and backwards of a step.

    Returns:
        What has to be told while a program runs.
    """
    kept = StepWeights()
    if keeps_weights(config, passes):
        for index, stage in stages.items():
            for name, (module, _) in eight_bit_layers(stage).items():
                change_products(module, kept_weights=kept, place=(index, name))
        log.info("weights in 8 bits are kept for all microbatches of a step")
    return kept


def products_of(module: nn.Module) -> EightBit | None:
    """The 8-bit products of a linear layer; None: it does not multiply in 8 bits."""
    if isinstance(module, Linear) and isinstance(module.multiply, EightBit):
        return module.multiply
    if isinstance(module, GroupedLinear) and isinstance(module.products, EightBitExperts):
        return module.products.each
    return None


def eight_bit_layers(stage: Stage) -> dict[str, tuple[nn.Module, EightBit]]:
    """The linear layers of a stage that multiply in 8 bits, by name in the whole model, with their
    products."""
    each = ((name, module, products_of(module)) for name, module in stage.named_modules())
    return {name: (module, how) for name, module, how in each if how is not None}


def install_delayed(
    stages: Mapping[int, Stage], layers: Sequence[ScaledLayer], config: Config, device: torch.device
) -> DelayedScaling:
    """Give the 8-bit linear layers of stages delayed scales, if requested.

    Args:
        stages: stages whose linear layers multiply in 8 bits.
        layers: all of these linear layers if their scales are to be delayed, or none.
        config: the configuration.
        device: where scales lie.

    Returns:
        What has to be told when steps begin and end.
    """
    scaling = DelayedScaling(layers, delayed_linears(config), config.training, device)
    named = {index: eight_bit_layers(stage) for index, stage in stages.items()}
    for layer, scales in scaling.of_layers():
        module, _ = named[layer.stage][layer.name]
        change_products(module, delayed=scales)
    return scaling


def change_products(module: nn.Module, **changes: Any) -> None:
    """Change attributes of the products of a linear layer that multiplies in 8 bits."""
    products = products_of(module)
    assert products is not None, "a layer that multiplies in 8 bits"
    changed = replace(products, **changes)
    if isinstance(module, GroupedLinear):
        module.products = EightBitExperts(changed)
    elif isinstance(module, Linear):
        module.multiply = changed


_NOT_AFTER_THE_NORM = frozenset(
    {"o_proj", "out_proj", "down_proj", "q_b_proj", "kv_b_proj", "fc2_latent_proj"}
)
