"""Activation recomputation: the backward recomputes activations instead of keeping them.

`full`: groups of layers keep only their input (Chen et al., Training Deep Nets with Sublinear
Memory Cost, 2016). `selective`: recompute modules whose activations are large and cheap
(Korthikanti et al. 2022). For a norm, its output is discarded, because the module after it saves
that.

Dropout masks are a function of the token, so no random state is restored. The backward of a region
repeats its forward once, up to the last tensor that it saved. Deferred weight gradients keep what
was recomputed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fivefold.config.memory import MemoryConfig
from fivefold.memory.tiles import Tiles, never_defer
from fivefold.model.attention.grouped_query import AttentionBlock
from fivefold.model.attention.latent import Heads, LatentAttention
from fivefold.model.context import Context
from fivefold.model.layer import Norm, TransformerLayer
from fivefold.model.layers import LayerBlock
from fivefold.model.mlp import MLP
from fivefold.model.moe.layer import Experts, MoE
from fivefold.model.places import placed_layers
from fivefold.model.transformer import RunLayer, Stage, plain_layers


def install_recompute(stage: Stage, memory: MemoryConfig) -> None:
    """Install recomputation in the seams of a stage.

    Args:
        stage: stage whose other seams are filled.
        memory: settings of the stage, with `recompute_granularity` set and modules that the model
            has.
    """
    tiles = Tiles(memory) if memory.tiled_mlp_num_shards > 1 else None
    if memory.recompute_granularity == "full":
        stage.through = RecomputedLayers(memory, _again)
        for layer in _recomputed_layers(stage, memory) if tiles is not None else ():
            _install_block(layer, (), tiles)
        return
    for place, layer in placed_layers(stage):
        if modules := memory.of_layer(place).recomputed_modules:
            _install_modules(layer, modules, tiles)


def _install_modules(
    layer: TransformerLayer, modules: tuple[str, ...], tiles: Tiles | None
) -> None:
    """Install recomputation of some modules of a layer."""
    _install_block(layer, modules, tiles)
    if "core_attn" in modules and isinstance(layer.self_attn, AttentionBlock):
        layer.self_attn.wrap_kernel(_recomputed_kernel)
    if "mla_up_proj" in modules and isinstance(layer.self_attn, LatentAttention):
        layer.self_attn.up = _discarded_up
    if not isinstance(layer.mlp, MoE) or "moe" in modules:
        return
    if "moe_act" in modules:
        layer.mlp.experts.second = recomputed_second
    if "routed_experts" in modules:
        layer.mlp.call_routed = _again
    if "shared_experts" in modules:
        layer.mlp.call_shared = _again
    if "a2a_overlap_post_attn" in modules:
        layer.mlp.call_router = _again


def _recomputed_layers(stage: Stage, memory: MemoryConfig) -> Iterator[TransformerLayer]:
    """The layers of a stage that full recomputation repeats."""
    layers = stage.transformer_layers
    for group, again in memory.recomputed_groups(len(stage.layers)):
        yield from (layers[place] for place in group if again)
    yield from layers[len(stage.layers) :]


def _install_block(layer: TransformerLayer, modules: tuple[str, ...], tiles: Tiles | None) -> None:
    if tiles is not None and isinstance(layer.mlp, MLP):
        never_defer(layer.mlp)
    layer.block = RecomputedBlock(modules, tiles)


@dataclass(frozen=True)
class RecomputedLayers:
    """The `through` seam: groups of layers that keep only their input.

    Attributes:
        memory: which layers form a group, and which groups are recomputed.
        again: runs the layers of a group so that the backward runs them again.
    """

    memory: MemoryConfig
    again: Callable[..., Tensor]

    def __call__(self, layers: Sequence[RunLayer], x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        for group, again in self.memory.recomputed_groups(len(layers)):
            inside = [layers[index] for index in group]
            run = self.again if again else _once
            x_TH = run(plain_layers, inside, x_TH, context)
        return x_TH


Hold = Callable[[Tensor], Callable[[], Tensor]]
"""Keeps a tensor from which others are recomputed, and returns it then."""


def plain_hold(x: Tensor) -> Callable[[], Tensor]:
    """Keep it on the device; offloading replaces this function."""
    return lambda: x


@dataclass(frozen=True)
class RecomputedBlock:
    """The `block` seam: a norm and the module after it.

    Attributes:
        modules: recomputed modules. `layernorm` discards the norm's output; the name of the module
            itself makes it keep only its input, or only that of its norm.
        tiles: how a dense MLP runs in tiles, each recomputed by itself; None: as a whole.
        hold: keeps the input of a norm whose output is discarded.
    """

    modules: tuple[str, ...]
    tiles: Tiles | None
    hold: Hold = plain_hold

    def __call__(self, norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
        """[T, H] -> [T, H]."""
        if module.recomputed_with_norm in self.modules:
            return _again(lambda x_TH, *rest: module(norm(x_TH), *rest), x_TH, *rest)
        run: Any = _again if module.recomputed_as in self.modules else _once
        if self.tiles is not None and isinstance(module, MLP):
            run = self.tiles
        discards = not module.discards_norm.isdisjoint(self.modules)
        if not discards:
            return run(module, norm(x_TH), *rest)
        normed_TH, held = norm(x_TH), self.hold(x_TH)
        with Discarded((normed_TH,), lambda: (norm(held()),)).hooks():
            return run(module, normed_TH, *rest)


def _discarded_up(make: Callable[[], Heads], attend: Callable[..., Tensor]) -> Tensor:
    """The `up` seam: recomputes queries, keys and values from latents."""
    made = make()
    with Discarded(made, make).hooks():
        return attend(*made)


class Discarded:
    """Tensors that the graph discards, and recomputes all at once when it needs the first.

    Recomputed tensors are kept until every saved use has been read.

    Args:
        tensors: tensors to discard, recognised by their storage while `hooks` is active; not by its
            address, which all tensors on shapes have in common.
        make: recomputes them.
    """

    def __init__(self, tensors: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> None:
        self._places = {x.untyped_storage()._cdata: i for i, x in enumerate(tensors)}
        self._make = make
        self._again: Sequence[Tensor] = ()
        self._saved = self._taken = 0

    def hooks(self) -> saved_tensors_hooks:
        """A context in which the graph saves how to recompute the tensors and their views."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        place = self._places.get(saved.untyped_storage()._cdata)
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


def recomputed_second(
    experts: Experts, inner: Sequence[Tensor], weights_R: Tensor | None, rows_E: Tensor
) -> Tensor:
    """The `second` seam: discards the activation's output."""
    made_RF = experts.activate(inner, weights_R)
    with Discarded([made_RF], lambda: [experts.activate(inner, weights_R)]).hooks():
        return experts.last(made_RF, weights_R, rows_E)


def _recomputed_kernel(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def again(*arguments: Any) -> Tensor:
        return _again(kernel, *arguments)

    return again


def _again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a function that the backward repeats."""
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


def _once(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)
