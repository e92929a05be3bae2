"""Activation offloading: saved tensors of chosen modules wait in host memory for the backward.

What these modules save is copied to the host and freed. A module's backward fetches it back, and
starts fetching for the previous module, so that copies overlap with compute.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.config.memory import MemoryConfig
from fivefold.memory.host import HostLink
from fivefold.memory.recompute import (
    Discarded,
    RecomputedBlock,
    RecomputedLayers,
    recomputed_second,
)
from fivefold.model.attention.latent import LatentAttention, plain_up
from fivefold.model.layer import Norm, NormedBlock
from fivefold.model.layers import LayerBlock
from fivefold.model.leaves import local
from fivefold.model.moe.layer import Experts
from fivefold.model.transformer import Stage

Result = TypeVar("Result")


def install_offload(stage: Stage, memory: MemoryConfig, host: "Host") -> None:
    """Install offloading in the seams of a stage, around what is already installed.

    Args:
        stage: stage whose other seams are filled.
        memory: gives `offload_modules` and `offload_tensors`.
        host: the offloaded tensors of this rank.
    """
    modules, tensors = memory.offload_modules, memory.offload_tensors
    if "layer_input" in tensors:
        through = stage.through
        assert isinstance(through, RecomputedLayers)
        stage.through = replace(through, again=host.moving(through.again, _state))
    for layer in stage.transformer_layers:
        attention, before_mlp = layer.self_attn, layer.post_attention_layernorm
        norms = {"attn_norm": layer.input_layernorm, "mlp_norm": before_mlp}
        moved = {id(norm) for name, norm in norms.items() if name in modules}
        made = {id(before_mlp)} if "pre_mlp_layernorm_output" in tensors else set[int]()
        if moved or made:
            layer.block = _MovingBlock(layer.block, moved, made, host)
        if attention is None:
            continue
        if "qkv_linear" in modules:
            _move_projected(attention, host)
        if "core_attn" in modules:
            attention.wrap_kernel(host.moving)
        if "attn_proj" in modules:
            attention.row = host.moving(attention.row)
    for mixture in stage.mixtures:
        experts = mixture.experts
        if "expert_fc1" in modules:
            for linear in experts.into:
                linear.multiply = host.moving(linear.multiply)
        if "moe_act" in modules:
            experts.second = _MovingSecond(host, discards=experts.second is recomputed_second)
        if "dispatched_input" in tensors:
            mixture.call_routed = host.moving(mixture.call_routed, _rows)


def _move_projected(mixer: LayerBlock, host: "Host") -> None:
    """Offload what the query, key and value projections and their adapters save, except latents
    from which recomputation makes these again, since it keeps them on the device."""
    mixer.project_whole = host.moving(mixer.project_whole)  # type: ignore[method-assign]
    if not isinstance(mixer, LatentAttention) or mixer.up is plain_up:
        mixer.project = host.moving(mixer.project)  # type: ignore[method-assign]


def _state(layers: Any, inside: Any, x_TH: Tensor, *rest: Any) -> set[int]:
    """The memory of the input, among the arguments of repeated layers."""
    return {_memory(x_TH)}


def _rows(experts: Any, rows_RH: Tensor, *rest: Any) -> set[int]:
    """The memory of the dispatched tokens, among the arguments of experts."""
    return {_memory(rows_RH)}


@dataclass(frozen=True)
class _MovingBlock:
    """Wraps a `block` seam: offloads the inputs of some norms, and the outputs of some."""

    block: NormedBlock
    moved: set[int]
    made: set[int]
    host: "Host"

    def __call__(self, norm: Norm, module: LayerBlock, x_TH: Tensor, *rest: Any) -> Tensor:
        """[T, H] -> [T, H]."""
        run, plain = self.block, norm
        if id(plain) in self.moved:
            norm = self.host.moving(norm)
            if isinstance(run, RecomputedBlock):
                run = replace(run, hold=self.host.hold)
        if id(plain) in self.made:
            inner, outputs = norm, set[int]()

            def norm(x_TH: Tensor) -> Tensor:
                normed_TH = inner(x_TH)
                outputs.add(_memory(normed_TH))
                return normed_TH

            run = self.host.moving(run, lambda *_: outputs)
        return run(norm, module, x_TH, *rest)


@dataclass(frozen=True)
class _MovingSecond:
    """The `second` seam of experts: offloads the inputs of their activation.

    Attributes:
        host: the offloaded tensors of this rank.
        discards: whether the activation's output is recomputed from them.
    """

    host: "Host"
    discards: bool

    def __call__(
        self, experts: Experts, inner: Sequence[Tensor], weights_R: Tensor | None, rows_E: Tensor
    ) -> Tensor:
        """[R, F] each -> [R, H]."""
        made_RF = self.host.moving(experts.activate)(inner, weights_R)
        if not self.discards:
            return experts.last(made_RF, weights_R, rows_E)
        held = [*map(self.host.hold, inner)]
        weights = None if weights_R is None else self.host.hold(weights_R)

        def again() -> list[Tensor]:
            given_R = None if weights is None else weights()
            return [experts.activate([each() for each in held], given_R)]

        with Discarded([made_RF], again).hooks():
            return experts.last(made_RF, weights_R, rows_E)


class Host:
    """The offloaded tensors of this rank.

    Args:
        device: device of the activations.
        min_bytes: size below which tensors stay on the device.
        share: share of each tensor's memory that goes.

    Attributes:
        link: copies to and from the host.
    """

    def __init__(self, device: torch.device, min_bytes: int, share: float = 1.0) -> None:
        self._least, self.share = min_bytes, share
        self.link = HostLink(device)
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Copy]]] = {}
        self._latest: weakref.ref[_Group] | None = None

    def moving(
        self, function: Callable[..., Result], only: Callable[..., set[int]] | None = None
    ) -> Callable[..., Result]:
        """Wrap a function so that what its forward saves is offloaded until its backward.

        Parameters of the function and of modules among its arguments are never offloaded.

        Args:
            function: what saves tensors.
            only: tells from the arguments which memory is offloaded where it is saved; may add to
                its result during the call. None: everything.
        """

        def run(*arguments: Any, **named: Any) -> Result:
            owners = [each for each in (function, *arguments) if isinstance(each, nn.Module)]
            parameters = (local(p) for owner in owners for p in owner.parameters())
            stay = {parameter.untyped_storage()._cdata for parameter in parameters}
            chosen = None if only is None else only(*arguments)
            group = _Group(self._latest)
            self._latest = weakref.ref(group)

            def pack(saved: Tensor) -> Tensor | _View:
                memory = saved.untyped_storage()  # decides for all views of the same storage
                small = memory.nbytes() < self._least or not saved.is_floating_point()
                other = chosen is not None and memory._cdata not in chosen
                if small or other or memory._cdata in stay:
                    return saved
                copy = self._copy_of(saved.detach())
                group.copies.append(copy)
                offset = int(saved.storage_offset())
                return _View(group, copy, saved.size(), saved.stride(), offset)

            with saved_tensors_hooks(pack, _unpack):
                return function(*arguments, **named)

        return run

    def hold(self, x: Tensor) -> Callable[[], Tensor]:
        """Keep an offloaded input of a function for repeating it, as its copy."""
        if not torch.is_grad_enabled() or x.untyped_storage().nbytes() < self._least:
            return lambda: x
        copy, size, stride = self._copy_of(x.detach()), x.size(), x.stride()
        offset = int(x.storage_offset())
        return lambda: copy.take().as_strided(size, stride, offset)

    def _copy_of(self, tensor: Tensor) -> "_Copy":
        """The copy of a tensor's storage, made once while both are alive."""
        storage = tensor.untyped_storage()
        self._known = {k: pair for k, pair in self._known.items() if not pair[0].expired()}
        known = self._known.get(storage._cdata)
        copy = None if known is None else known[1]()
        if copy is None:
            flat = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            copy = _Copy(self, flat)
            self._known[storage._cdata] = StorageWeakRef(storage), weakref.ref(copy)
        return copy


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Group:
    """The copies of one module, and the group of the module before it."""

    def __init__(self, before: "weakref.ref[_Group] | None") -> None:
        self.copies: list[_Copy] = []
        self.before = before

    def fetch(self) -> None:
        """Start fetching this group and the previous one, whose backward is next."""
        groups = (self, None if self.before is None else self.before())
        for copy in [copy for group in groups if group is not None for copy in group.copies]:
            copy.fetch()


class _Copy:
    """One storage on the host, and on the device again once fetched.

    What does not go is copied, too: the storage is freed as a whole, or not at all.
    """

    def __init__(self, host: Host, flat: Tensor) -> None:
        self._link, self._size = host.link, len(flat)
        goes = ceil(host.share * len(flat))
        self._rest = flat[goes:].clone()
        self._kept, self._event = host.link.to_host(flat[:goes])
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        """Start copying it back, unless already started."""
        if self._fetched is None:
            self._fetched = self._rest.new_empty(self._size)
            self._fetched[len(self._kept) :] = self._rest
            self._rest = self._rest[:0].clone()  # frees it
            onto = self._fetched[: len(self._kept)]
            self._event = self._link.to_device(self._kept, onto, after=self._event)

    def take(self) -> Tensor:
        """The flat tensor on the device."""
        self.fetch()
        assert self._fetched is not None
        self._link.wait(self._event)
        return self._fetched


@dataclass(frozen=True)
class _View:
    """A saved tensor as a view of a copy; keeps its group alive."""

    group: _Group
    copy: _Copy
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    packed.group.fetch()
    return packed.copy.take().as_strided(packed.size, packed.stride, packed.offset)
