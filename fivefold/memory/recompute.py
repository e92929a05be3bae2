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
from fivefold.model.context import Context
from fivefold.model.experts import Experts
from fivefold.model.latent_attention import Heads, LatentAttention
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
            layer.self_attn.wrap_kernel(_recomputed_kernel)
        if "mla_up_proj" in modules and isinstance(layer.self_attn, LatentAttention):
            layer.self_attn.up = _discarded_up
    for mixture in stage.mixtures if "moe" not in modules else ():
        if "moe_act" in modules:
            mixture.experts.second = _second_again
        if "routed_experts" in modules:
            mixture.call_routed = _again
        if "shared_experts" in modules:
            mixture.call_shared = _again


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
        with _Discarded((normed_TH,), lambda: (norm(x_TH),)).hooks():
            return run(module, normed_TH, *rest)


def _discarded_up(make: Callable[[], Heads], attend: Callable[..., Tensor]) -> Tensor:
    """The `up` seam: queries, keys and values are made again of their latents."""
    made = make()
    if not torch.is_grad_enabled():
        return attend(*made)
    with _Discarded(made, make).hooks():
        return attend(*made)


class _Discarded:
    """Tensors that the graph gives up, and makes again, all at once, when it needs one of them.

    They are held until what was saved of them has been taken.

    Args:
        tensors: recognised by their memory, for as long as `hooks` is entered.
        make: makes them again.
    """

    def __init__(self, tensors: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> None:
        self._places = {x.untyped_storage().data_ptr(): i for i, x in enumerate(tensors)}
        self._make = make
        self._again: Sequence[Tensor] = ()
        self._saved = self._taken = 0

    def hooks(self) -> saved_tensors_hooks:
        """In this context the graph saves the tensors, and views of them, as how to make them."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        place = self._places.get(saved.untyped_storage().data_ptr())
        if place is None:
            return saved
        self._saved += 1
        size, stride, offset = saved.size(), saved.stride(), saved.storage_offset()
        return lambda: self._take(place).as_strided(size, stride, offset)

    def _take(self, place: int) -> Tensor:
        if not self._again:
            self._again = self._make()
        tensor = self._again[place]
        self._taken += 1
        if self._taken % self._saved == 0:
            self._again = ()
        return tensor

    def _unpack(self, packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()


def _second_again(
    experts: Experts, inner: Sequence[Tensor], weights_R: Tensor, rows_E: Tensor
) -> Tensor:
    """The `second` seam: the activation's output is discarded."""
    made_RF = experts.activate(inner, weights_R)
    if not torch.is_grad_enabled():
        return experts.last(made_RF, weights_R, rows_E)
    with _Discarded([made_RF], lambda: [experts.activate(inner, weights_R)]).hooks():
        return experts.last(made_RF, weights_R, rows_E)


def _recomputed_kernel(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def again(*arguments: Any) -> Tensor:
        return _again(kernel, *arguments)

    return again


def _again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a function whose backward runs it once more."""
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def _once(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)
