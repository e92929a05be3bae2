"""Activations that the backward makes again instead of keeping them.

`full`: groups of layers keep their input only (Chen et al., Training Deep Nets with Sublinear
Memory Cost, 2016). `selective`: modules that hold much and cost little (Korthikanti et al. 2022);
a norm's output is discarded instead, since what saved it is the module behind.

Dropout masks are a function of the token, so that nothing has to be restored. The backward of a
region repeats its forward up to the last tensor that it saved, once; weight gradients that wait
keep what the repetition made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fivefold.config.memory import MemoryConfig
from fivefold.model.attention import Kernel
from fivefold.model.context import Context
from fivefold.model.layers import LayerBlock
from fivefold.model.transformer import Norm, RunLayer, Stage, plain_layers


def install_recompute(stage: Stage, memory: MemoryConfig) -> None:
    """Put recomputation into the seams of a stage.

    Args:
        stage: stage whose other seams are filled.
        memory: `recompute_granularity` is set, with modules that the model has.
    """
    if memory.recompute_granularity == "full":
        stage.through = RecomputedLayers(memory)
        return
    modules = memory.recompute_modules
    for layer in stage.transformer_layers:
        layer.block = RecomputedBlock(modules)
        if "core_attn" in modules:
            layer.self_attn.kernel = _recomputed_kernel(layer.self_attn.kernel)


@dataclass(frozen=True)
class RecomputedLayers:
    """The `through` seam: groups of layers, of which each keeps its input only."""

    memory: MemoryConfig

    def __call__(self, layers: Sequence[RunLayer], x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        for group, again in self.memory.recomputed_groups(len(layers)):
            inside = [layers[index] for index in group]
            run = _again if again else _once
            x_TH = run(plain_layers, inside, x_TH, context)
        return x_TH


@dataclass(frozen=True)
class RecomputedBlock:
    """The `block` seam: a module on the output of a norm.

    Attributes:
        modules: recomputed modules: `layernorm` discards the norm's output, any other lets the
            module that is recomputed as it keep its input only.
    """

    modules: tuple[str, ...]

    def __call__(self, norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
        """[T, H] -> [T, H]."""
        run = _again if module.recomputed_as in self.modules else _once
        if not ("layernorm" in self.modules and torch.is_grad_enabled()):
            return run(module, norm(x_TH), *rest)
        normed_TH = norm(x_TH)
        with _Discarded(normed_TH, lambda: norm(x_TH)).hooks():
            return run(module, normed_TH, *rest)


class _Discarded:
    """A tensor that the graph gives up, and makes again when it needs it.

    Args:
        tensor: recognised by its memory, for as long as `hooks` is entered.
        make: makes it again.
    """

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self._memory = tensor.untyped_storage().data_ptr()
        self._make = make

    def hooks(self) -> saved_tensors_hooks:
        """In this context the graph saves the tensor, and views of it, as how to make them."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        if saved.untyped_storage().data_ptr() != self._memory:
            return saved
        size, stride, offset = saved.size(), saved.stride(), saved.storage_offset()
        make = self._make
        return lambda: make().as_strided(size, stride, offset)

    def _unpack(self, packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()


def _recomputed_kernel(kernel: Kernel) -> Kernel:
    def again(*arguments: Any) -> Tensor:
        return _again(kernel, *arguments)

    return again


def _again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a function whose backward runs it once more."""
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def _once(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)
