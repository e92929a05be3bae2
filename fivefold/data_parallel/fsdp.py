"""ZeRO-1/2/3, HSDP and master weights: one stage under FSDP2's switches."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fivefold.data_parallel.communication import AllGather, ReduceScatter
from fivefold.data_parallel.policy import Policy
from fivefold.mesh.groups import Groups
from fivefold.mesh.slices import local_tensor
from fivefold.model.experts import Experts
from fivefold.model.prediction import FurtherToken
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import Work, run_works


class ShardedStage:
    """A stage whose parameters FSDP2 holds; each layer is a unit, also with what stands around it
    where it predicts a further token; the ends are one with the stage.

    The experts of a layer are a unit of their own, on a mesh of their own.

    Args:
        stage: stage to be wrapped, tensor and expert parallelism installed, still on the meta
            device.
        groups: groups of this rank; parameters are laid out on `groups.mesh`, those of experts on
            `groups.experts.mesh`.
        policy: the switches.
        reduces_in_hooks: whether the last backward, or the last deferred work, itself reduces
            gradients, block by block; otherwise `reduce` does.
    """

    def __init__(
        self, stage: Stage, groups: Groups, policy: Policy, *, reduces_in_hooks: bool
    ) -> None:
        self._policy = policy
        self._in_hooks, self._every = reduces_in_hooks, policy.reduces_every_microbatch
        types = MixedPrecisionPolicy(cast_forward_inputs=False)
        if policy.compute_dtype != policy.master_dtype:
            types = MixedPrecisionPolicy(
                param_dtype=policy.compute_dtype,
                reduce_dtype=policy.master_dtype,
                cast_forward_inputs=False,
            )
        dense = _data_mesh(groups.mesh, policy)
        meshes: dict[nn.Module, DeviceMesh] = dict.fromkeys(
            (*stage.layers.values(), *stage.predictions, stage), dense
        )
        if groups.experts is not None:
            of_experts = _data_mesh(groups.experts.mesh, policy)
            meshes = dict.fromkeys((m.experts for m in stage.mixtures), of_experts) | meshes
        for module, mesh in meshes.items():
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=types,
                reshard_after_forward=policy.reshards,
                shard_placement_fn=partial(_split_dim, shards=mesh.size(-1)),
            )
        self._units = [m for m in stage.modules() if isinstance(m, FSDPModule)]
        self._root = self._units[0]
        for unit in self._units:
            # The loss is divided by the global token count already: reductions are plain sums.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            wrapped: Any = unit
            self._set_communication(unit, meshes[wrapped])
        self._set_prefetch(policy.overlap_param_gather)

    def _set_prefetch(self, early: bool) -> None:
        """Gather each block's parameters while the one before it computes, or none early.

        Left alone, FSDP2 gathers in the backward what ran before in the order of all forwards; a
        pipeline interleaves microbatches, and the last of these gathers would be for nothing. To
        gather the root, which still is gathered in a backward, means to gather nothing. Predictions
        of further tokens, which an evaluation leaves out, are gathered when they run.
        """
        root, *layers = self._units
        backward = [root, *_last_layer_first(layers)]
        for unit, following in zip(backward, [*backward[1:], root], strict=True):
            unit.set_modules_to_backward_prefetch([following if early else root])
        predictions = [unit for unit in layers if isinstance(unit, FurtherToken)]
        parts = [[m for m in each.modules() if m in layers] for each in predictions]
        always = [unit for unit in layers if unit not in {m for part in parts for m in part}]
        for run in (always, *parts) if early else ():
            for unit, others in _with_following(run):
                unit.set_modules_to_forward_prefetch(others)

    def _set_communication(self, unit: FSDPModule, mesh: DeviceMesh) -> None:
        on_cpu = mesh.device_type == "cpu"
        module: Any = unit  # FSDP2 asks for `Work`, of which it only uses `wait`
        if not self._policy.shards or mesh.size(-1) == 1:
            return
        if on_cpu:
            module.set_custom_all_gather(AllGather())
        if on_cpu or self._policy.wire_dtype != self._policy.master_dtype:
            module.set_custom_reduce_scatter(ReduceScatter(self._policy.wire_dtype))

    def before_backward(self, *, whole: bool, last: bool) -> None:
        """Set what the coming backward does with gradients.

        Args:
            whole: whether it computes them all; otherwise those of deferred weights follow in
                `run_weights`, and nothing is reduced before them.
            last: whether it is the last of the step, on this stage.
        """
        reduces = whole and (self._every or (last and self._in_hooks))
        self._set(reduces, last=last, reshards=self._policy.reshards or (last and reduces))

    def run_weights(self, works: Sequence[Work], *, last: bool) -> None:
        """Run deferred work, and reduce each block's gradients as soon as they are complete.

        Hooks of autograd do not tell FSDP2 of these gradients; its post-backward is run here.
        """
        reduces = self._every or (last and self._in_hooks)
        self._set(reduces, last=last, reshards=last and reduces)
        group_of = {
            held.unsharded_param: group
            for unit in self._units
            for group in _parameter_groups(unit)
            for held in group.fsdp_params
        }
        awaited = Counter(group_of[p] for work in works for p in work.parameters)
        for group in dict.fromkeys(group_of.values()):
            if not awaited[group]:  # the backward left nothing of it, as a fused head and loss do
                _complete(group)
        for parameter in run_works(works):
            group = group_of[parameter]
            awaited[group] -= 1
            if not awaited[group]:
                _complete(group)
        self._end_of_backward()

    def reduce(self) -> None:
        """Reduce what the step's backwards left on the parameters and free what was gathered."""
        if self._in_hooks or self._every:
            return
        self._set(True, last=True, reshards=True)
        for unit in reversed(self._units):
            for group in _parameter_groups(unit):
                group.post_backward()
        self._end_of_backward()

    def _set(self, reduces: bool, *, last: bool, reshards: bool) -> None:
        self._root.set_is_last_backward(last and reduces)
        self._root.set_requires_gradient_sync(reduces)
        self._root.set_requires_all_reduce(last)
        self._root.set_reshard_after_backward(reshards)

    def _end_of_backward(self) -> None:
        """What FSDP2 does when a backward ends; it has no public call for that, nor for "reduce
        now": PyTorch's own pipelining uses the same ones."""
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def finish(self) -> None:
        """Nothing is left to wait for: FSDP2 orders the optimizer after its reductions."""

    def unshard(self) -> None:
        """Gather every block's parameters; they stay until `reshard`."""
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Free gathered parameters, as after an evaluation or before they are written."""
        for unit in self._units:
            unit.reshard()


def _data_mesh(mesh: DeviceMesh, policy: Policy) -> DeviceMesh:
    """The axes of replicas and shards of a parameter mesh; replicas only where there are some."""
    assert mesh.mesh_dim_names is not None
    axes = mesh.mesh_dim_names[:2]
    return mesh[axes if mesh.size(0) > 1 or not policy.shards else axes[1]]


def _split_dim(parameter: nn.Parameter, *, shards: int) -> Shard | None:
    """The dim that shards divide; of fewer experts than shards another one, where it divides."""
    local = local_tensor(parameter)
    if local.dim() < 3 or local.shape[0] % shards == 0 or local.shape[1] % shards:
        return None
    return Shard(1)


def _with_following(
    units: Sequence[FSDPModule],
) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    """Each layer with its own experts and the layer after it. Experts are followed by nothing: a
    backward that runs them again would gather a layer that is done with."""
    places = [place for place, unit in enumerate(units) if not isinstance(unit, Experts)]
    for place, after in pairwise([*places, len(units)]):
        yield units[place], list(units[place + 1 : after + 1])


def _last_layer_first(units: Sequence[FSDPModule]) -> Iterator[FSDPModule]:
    """The order of a backward: the last layer before the others, each before its experts."""
    experts: list[FSDPModule] = []
    for unit in reversed(units):
        if isinstance(unit, Experts):
            experts.append(unit)
        else:
            yield unit
            yield from experts
            experts = []


def _parameter_groups(unit: FSDPModule) -> list:
    """FSDP2's parameter groups of one unit: a list since torch 2.12, one or none before."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _complete(group: Any) -> None:
    """Reduce a group, after every parameter of it has a gradient of the type in which FSDP2 sums.

    What a B computed itself (of norms) is widened by then, and is gone where several B's ran
    before the first of their W's took it along.
    """
    for held in group.fsdp_params:
        if held.unsharded_accumulated_grad is None and held.unsharded_param.grad is None:
            held.unsharded_param.grad = torch.zeros_like(held.unsharded_param)
        held.accumulate_unsharded_grad_if_needed()
        held.to_accumulated_grad_if_needed()
    group.post_backward()
