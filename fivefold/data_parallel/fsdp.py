"""ZeRO-1/2/3, HSDP and master weights, implemented with FSDP2."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard
from torch.distributed.tensor import Shard

from fivefold.data_parallel import fsdp_internals as internals
from fivefold.data_parallel.blocks import shard_dim
from fivefold.data_parallel.communication import (
    HierarchicalReduceScatter,
    NodeGather,
    set_communication,
)
from fivefold.data_parallel.eight_bit import EightBitParam, agree_on_scales, gather_in_eight_bits
from fivefold.data_parallel.fsdp_internals import parameter_groups
from fivefold.data_parallel.hooks import UnitHooks
from fivefold.data_parallel.left_over import complete, put_aside
from fivefold.data_parallel.offloaded_shards import OffloadedShards, give_memory
from fivefold.data_parallel.policy import Policy
from fivefold.data_parallel.prefetch import last_layer_first, set_prefetch
from fivefold.data_parallel.stage_gradients import StageGradients
from fivefold.mesh.groups import Groups, NodeGroups
from fivefold.mesh.slices import local_tensor
from fivefold.model.moe.layer import Experts
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import Sum, Work, run_works


class ShardedStage(StageGradients):
    """A stage whose parameters FSDP2 holds.

    One class because every act of a step sets the same switches of the same units of FSDP2.

    FSDP2 units are each layer (with its norms and projection if it is a multi-token prediction
    layer), the experts of each layer on a mesh of their own, and the stage itself with both ends.

    Args:
        stage: stage to wrap, still on the meta device, with tensor and expert parallelism
            installed.
        groups: process groups of this rank; parameters are laid out on `groups.mesh`, experts on
            `groups.experts.mesh`.
        policy: FSDP2 settings.
        reduces_in_hooks: whether the last backward, or the last deferred weight gradients, reduce
            gradients block by block; otherwise `reduce` does.
        by_hand: whether forwards of the stage alternate with its own backwards, which FSDP2's hooks
            do not support: then `unshard` gathers parameters, and `after_backward` reduces.

    Attributes:
        exchanges: gathers and reductions of ZeRO++, of all units.
    """

    def __init__(
        self, stage: Stage, groups: Groups, policy: Policy, *, reduces_in_hooks: bool, by_hand: bool
    ) -> None:
        self._policy, self._by_hand = policy, by_hand
        self._in_hooks, self._every = reduces_in_hooks, policy.reduces_every_microbatch
        self._stage = stage
        meshes = _meshes(stage, groups, policy)
        for module, mesh in meshes.items():
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=_types(policy),
                reshard_after_forward=policy.reshards,
                shard_placement_fn=partial(_split_dim, shards=mesh.size(-1)),
            )
        self._units = [m for m in stage.modules() if isinstance(m, FSDPModule)]
        self.exchanges: list[NodeGather | HierarchicalReduceScatter] = []
        self._narrow: dict[Any, list[EightBitParam]] = defaultdict(list)  # by sharing module
        self._scales_known = False
        self._switches: tuple[bool, bool, bool] | None = None
        self._unreduced = 0  # backwards whose gradients partly still wait for their reduction
        self._held: dict[torch.Tensor, Any] = {}  # whole parameter -> FSDP2's record of it
        self._root = self._units[0]
        # Experts that make several predictions have several backwards. None of them may free what
        # the next one needs, and only the last one reduces.
        self._at_end: list[Any] = []
        if stage.model.mtp_use_repeated_layer and not policy.reshards:
            within = {module for each in stage.predictions for module in each.modules()}
            apart = [unit for unit in self._units if isinstance(unit, Experts)]
            self._at_end = [unit for unit in apart if unit in within]
        self._gathers: list[UnshardHandle] = []
        # The end of a stage's last backward would wait for its reductions; `finish` does.
        self._root.set_is_last_backward(False)
        for unit in self._units:
            wrapped: Any = unit
            owner = groups.experts if isinstance(wrapped, Experts) else None
            self._set_up(unit, meshes[wrapped], (owner or groups).nodes)
        self._hooks: UnitHooks | None = None
        if not by_hand:
            set_prefetch(self._units, policy.overlap_param_gather)
            groups_of_all = self.parameter_groups()
            self._hooks = UnitHooks(self._units, groups_of_all, once=not self._every)
        self._offloaded: Mapping[nn.Module, OffloadedShards] = {}

    def _set_up(self, unit: FSDPModule, mesh: DeviceMesh, nodes: NodeGroups) -> None:
        """Choose the messages of a unit, and how gradients are summed."""
        # The loss is already divided by the global token count, so reductions are plain sums.
        if mesh.size() > 1:  # with one rank, FSDP2 would divide a copy by 1
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        groups, policy = parameter_groups(unit), self._policy
        self.exchanges += set_communication(unit, groups, mesh, policy, nodes)
        if policy.gathers_8_bits:
            shards = mesh.get_group(-1) if mesh.size(-1) > 1 else None
            for group in groups:
                self._narrow[shards] += gather_in_eight_bits(group, policy.compute_dtype)
        if self._by_hand:
            internals.without_hooks(unit)

    def give_memory(self, device: torch.device, offloaded: Collection[str]) -> None:
        """Allocate all parameters, uninitialised; those in `offloaded` keep no shard here."""
        groups: dict[nn.Module, Any] = {unit: parameter_groups(unit) for unit in self._units}
        self._offloaded = give_memory(self._stage, device, groups, offloaded)

    def offloaded(self, *, backward: bool = False, mtp: bool = True) -> Iterator[OffloadedShards]:
        """Blocks whose shards are elsewhere, in the order in which a forward or a `backward`
        gathers them; `mtp`: with multi-token prediction."""
        order: list[Any] = self._units
        if backward:
            root, *layers = self._units
            order = [*last_layer_first(layers)]
            # Without the head the stage's output is its last layer's, whose hook comes first.
            first = 0 if self._stage.parts.head else 1 + self._policy.overlap_param_gather
            order.insert(first, root)
        left_out = {m for each in self._stage.predictions for m in each.modules() if not mtp}
        yield from (self._offloaded[u] for u in order if u in self._offloaded and u not in left_out)

    def before_run(self, *, trains: bool) -> None:
        """Agree on the scales of weights that are gathered in 8 bits, if weights may be new.

        What a step gathers once starts to travel where stages would wait for the first message.
        """
        if not self._scales_known:
            for shards, held in self._narrow.items():
                agree_on_scales(held, shards)
        self._scales_known = True
        if trains and self._policy.gathers_at_start and not self._offloaded:
            self.unshard()

    def set_gradient_type(self) -> None:
        """Reduce into the type in which gradients are kept, if it differs from the parameters'.

        FSDP2 would convert to the parameters' type: that of masters on the device, or where these
        are on the host the compute dtype.
        """
        internals.begin(self._root)
        for group in self.parameter_groups():
            internals.reduce_into(group, self._policy.gradient_dtype)
        for parameter in self._stage.parameters():
            parameter.grad_dtype = self._policy.gradient_dtype

    def before_forward(self, *, last: bool) -> None:
        """Skip FSDP2's hooks if weights are gathered and the backward reduces no gradients."""
        if self._hooks is not None:
            self._hooks.before_forward(reduces=last and self._in_hooks)

    def before_backward(self, *, whole: bool, last: bool) -> None:
        """Set what the coming backward does with gradients."""
        reduces = whole and (self._every or (last and self._in_hooks))
        self._set(reduces, last=last, reshards=self._policy.reshards or (last and reduces))
        if self._hooks is not None:
            self._hooks.before_backward(reduces=reduces)
        self._unreduced = 0 if reduces and not self._by_hand else self._unreduced + 1
        internals.free_gathered(self._root)

    def after_backward(self, *, last: bool) -> None:
        """Reduce gradients that FSDP2's hooks do not reduce."""
        if self._by_hand:
            self.run_weights([], last=last)
        else:
            internals.free_message(self._root)

    def put_aside(self) -> list[Work]:
        """See `left_over.put_aside`; sums to the end of the step are in one dtype anyway."""
        narrow, groups = self._policy.compute_dtype, self.parameter_groups() if self._every else ()
        return [work for group in groups for work in put_aside(group, narrow)]

    def run_weights(self, works: list[Work], *, last: bool) -> None:
        """Run deferred weight gradients and reduce each block when its gradients are complete.

        Autograd hooks do not tell FSDP2 of these gradients, so its post-backward is called here.
        """
        reduces = self._every or (last and self._in_hooks)
        self._set(reduces, last=last, reshards=last and reduces)
        narrow = self._policy.compute_dtype if reduces and self._unreduced <= 1 else None
        if reduces:
            self._unreduced = 0
        group_of = {
            held.unsharded_param: group
            for group in self.parameter_groups()
            for held in group.fsdp_params
        }
        awaited = Counter(group_of[p] for work in works for p in work.parameters)
        for group in dict.fromkeys(group_of.values()):
            if not awaited[group]:  # nothing is deferred here, e.g. a fused head and loss
                complete(group, narrow)
        for parameter in run_works(works):
            group = group_of[parameter]
            awaited[group] -= 1
            if not awaited[group]:
                complete(group, narrow)
        internals.end_backward(self._root)
        internals.free_message(self._root)

    def reduce(self) -> None:
        """Reduce the accumulated gradients of the step and free gathered parameters."""
        if self._in_hooks or self._every:
            return
        self._set(True, last=True, reshards=True)
        for unit in reversed(self._units):
            for group in parameter_groups(unit):
                group.post_backward()
        internals.end_backward(self._root)

    def sum_of(self, parameter: torch.Tensor, whole: bool) -> Sum | None:
        """Where a parameter's gradients are accumulated; None: nowhere, or it belongs to another
        stage."""
        held = self._held.get(parameter)
        if held is None:
            return None
        main = held.unsharded_accumulated_grad
        main = parameter.grad if main is None else main
        return None if main is None else Sum(local_tensor(main))

    def _set(self, reduces: bool, *, last: bool, reshards: bool) -> None:
        if not self._every:
            each = (held for group in self.parameter_groups() for held in group.fsdp_params)
            gathered = (held for held in each if internals.was_gathered(held))
            self._held = {held.unsharded_param: held for held in gathered}
        if self._switches == (reduces, last, reshards):
            return
        self._switches = reduces, last, reshards
        for unit in self._units:  # asked at the root, FSDP2 would search all modules
            unit.set_requires_gradient_sync(reduces, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(reshards, recurse=False)
        for unit in self._at_end:
            unit.set_requires_gradient_sync(reduces and self._every, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)

    def finish(self) -> None:
        """Make the following computation wait for the reductions of this stage's gradients."""
        for unit in self._at_end:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            for group in parameter_groups(unit):
                group.post_backward()
        self._switches = None
        self._root.set_is_last_backward(True)
        internals.end_backward(self._root)
        self._root.set_is_last_backward(False)
        self._gathers, self._unreduced = [], 0
        self.forget()

    def forget(self) -> None:
        """Make the next gathers read from all ranks with new scales, since weights may change."""
        self._scales_known = False
        for exchange in self.exchanges:
            if isinstance(exchange, NodeGather):
                exchange.kept = None

    def second_copies(self) -> Iterator[torch.Tensor]:
        """This rank's parts of its node's copies of gathered weights, until weights may change."""
        gathers = (each for each in self.exchanges if isinstance(each, NodeGather))
        yield from (each.kept for each in gathers if each.kept is not None)

    def waiting_gradients(self) -> Iterator[torch.Tensor]:
        """Whole gradients, summed over microbatches, that wait for the reduction at the end."""
        for group in self.parameter_groups():
            waiting = (held.unsharded_accumulated_grad for held in group.fsdp_params)
            yield from (grad for grad in waiting if grad is not None)

    def parameter_groups(self) -> list[Any]:
        """FSDP2's parameter groups; each gathers and reduces its parameters together."""
        return [group for unit in self._units for group in parameter_groups(unit)]

    def unshard(self) -> None:
        """Start to gather every block's parameters, which stay until `reshard`."""
        internals.begin(self._root)
        for unit in self._units:
            self._gather(unit)

    def await_unshard(self) -> None:
        """Wait for started gathers that FSDP2's hooks do not wait for."""
        if self._by_hand:
            self._finish_gathers()

    def reshard(self) -> None:
        """Free gathered parameters, as after an evaluation or before they are written."""
        self._finish_gathers()
        for unit in self._units:
            unit.reshard()

    def settle(self) -> list[Any]:
        """Drop the events that FSDP2 keeps for later waits; the device has finished all its work.

        Most are gone when a step ends; gathers that an evaluation began for nothing are not.
        """
        self.reshard()
        return internals.release_gathers(self._root, self.parameter_groups())

    def blocks(self) -> Iterator[tuple[list[nn.Parameter], Callable[[], None]]]:
        """Each block's own parameters in the order of a forward, and what starts their gather."""
        for unit in self._units:
            held = [each for group in parameter_groups(unit) for each in group.fsdp_params]
            if held:  # a stage without ends holds nothing besides its layers
                yield [each.sharded_param for each in held], partial(self._gather, unit)

    def _gather(self, unit: FSDPModule) -> None:
        handle = unit.unshard(async_op=True)
        assert handle is not None
        self._gathers.append(handle)

    def _finish_gathers(self) -> None:
        for handle in self._gathers:
            handle.wait()
        self._gathers = []


def _types(policy: Policy) -> MixedPrecisionPolicy:
    """Types in which FSDP2 gathers and reduces, if they differ from the parameters'."""
    if {policy.master_dtype, policy.gradient_dtype} == {policy.compute_dtype}:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=policy.compute_dtype,
        reduce_dtype=policy.gradient_dtype,
        cast_forward_inputs=False,
    )


def _meshes(stage: Stage, groups: Groups, policy: Policy) -> dict[nn.Module, DeviceMesh]:
    """The units of a stage, inner ones first, with the mesh that shards the state of each."""
    meshes: dict[nn.Module, DeviceMesh] = {}
    if groups.experts is not None:
        of_experts = _data_mesh(groups.experts.mesh, policy)
        meshes = dict.fromkeys((m.experts for m in stage.mixtures), of_experts)
    units = *stage.layers.values(), *stage.predictions, stage
    return meshes | dict.fromkeys(units, _data_mesh(groups.mesh, policy))


def _data_mesh(mesh: DeviceMesh, policy: Policy) -> DeviceMesh:
    """The replica and shard axes of a parameter mesh; without replicas only the shard axis."""
    assert mesh.mesh_dim_names is not None
    axes = mesh.mesh_dim_names[:2]
    return mesh[axes if mesh.size(0) > 1 or not policy.shards else axes[1]]


def _split_dim(parameter: nn.Parameter, *, shards: int) -> Shard | None:
    """The dim that shards split; None: the first."""
    dim = shard_dim(local_tensor(parameter).shape, shards)
    return Shard(dim) if dim else None
