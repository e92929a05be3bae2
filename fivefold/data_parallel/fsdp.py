"""ZeRO-1/2/3, HSDP and master weights: one stage under FSDP2's switches."""

from itertools import pairwise
from typing import Any

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fivefold.data_parallel.communication import AllGather, ReduceScatter
from fivefold.data_parallel.policy import Policy
from fivefold.mesh.groups import Groups
from fivefold.model.transformer import Stage


class ShardedStage:
    """A stage whose parameters FSDP2 holds; each layer is a unit, the ends are one with the stage.

    Args:
        stage: to be wrapped, tensor parallelism installed, still on the meta device.
        groups: of this rank; parameters are laid out on `groups.mesh`.
        policy: the switches.
        reduces_in_hooks: whether the last backward itself reduces gradients, block by block;
            otherwise `reduce` does, after weight gradients that were deferred.
    """

    def __init__(
        self, stage: Stage, groups: Groups, policy: Policy, *, reduces_in_hooks: bool
    ) -> None:
        self._policy = policy
        self._in_hooks = reduces_in_hooks or policy.reduces_every_microbatch
        axes = ("dp_replicate", "dp_shard_cp")
        mesh = groups.mesh[axes if groups.mesh.size(0) > 1 or not policy.shards else axes[1]]
        types = MixedPrecisionPolicy(cast_forward_inputs=False)
        if policy.compute_dtype != policy.master_dtype:
            types = MixedPrecisionPolicy(
                param_dtype=policy.compute_dtype,
                reduce_dtype=policy.master_dtype,
                cast_forward_inputs=False,
            )
        for module in (*stage.layers.values(), stage):
            fully_shard(module, mesh=mesh, mp_policy=types, reshard_after_forward=policy.reshards)
        self._units = [m for m in stage.modules() if isinstance(m, FSDPModule)]
        self._root = self._units[0]
        for unit in self._units:
            # The loss is divided by the global token count already: reductions are plain sums.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            self._set_communication(unit, groups)
        self._set_prefetch(policy.overlap_param_gather)

    def _set_prefetch(self, early: bool) -> None:
        """Gather each block's parameters while the one before it computes, or none early.

        Left alone, FSDP2 gathers in the backward what ran before in the order of all forwards; a
        pipeline interleaves microbatches, and the last of these gathers would be for nothing. To
        gather the root, which still is gathered in a backward, means to gather nothing.
        """
        root, *layers = self._units
        for unit, before in zip(layers, self._units, strict=False):
            unit.set_modules_to_backward_prefetch([before if early else root])
        root.set_modules_to_backward_prefetch([self._units[-1] if early else root])
        for unit, following in pairwise(layers if early else ()):
            unit.set_modules_to_forward_prefetch([following])

    def _set_communication(self, unit: FSDPModule, groups: Groups) -> None:
        on_cpu = groups.mesh.device_type == "cpu"
        module: Any = unit  # FSDP2 asks for `Work`, of which it only uses `wait`
        if not self._policy.shards or groups.mesh.size(1) == 1:
            return
        if on_cpu:
            module.set_custom_all_gather(AllGather())
        if on_cpu or self._policy.wire_dtype != self._policy.master_dtype:
            module.set_custom_reduce_scatter(ReduceScatter(self._policy.wire_dtype))

    def before_backward(self, last: bool) -> None:
        """Set what the coming backward does with gradients; `last`: of the step, on this stage."""
        every = self._policy.reduces_every_microbatch
        reduces = self._in_hooks and (every or last)
        self._root.set_is_last_backward(last and self._in_hooks)
        self._root.set_requires_gradient_sync(reduces)
        self._root.set_requires_all_reduce(last)
        self._root.set_reshard_after_backward(self._policy.reshards or (last and self._in_hooks))

    def reduce(self) -> None:
        """Reduce what the step's backwards left on the parameters and free what was gathered."""
        if self._in_hooks:
            return
        self._root.set_is_last_backward(True)
        self._root.set_requires_gradient_sync(True)
        self._root.set_requires_all_reduce(True)
        self._root.set_reshard_after_backward(True)
        # FSDP2 has no public call for "reduce now"; PyTorch's own pipelining uses these two.
        for unit in reversed(self._units):
            for group in _parameter_groups(unit):
                group.post_backward()
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def finish(self) -> None:
        """Nothing is left to wait for: FSDP2 orders the optimizer after its reductions."""

    def reshard(self) -> None:
        """Free gathered parameters, as after an evaluation or before they are written."""
        for unit in self._units:
            unit.reshard()


def _parameter_groups(unit: FSDPModule) -> list:
    """FSDP2's parameter groups of one unit: a list since torch 2.12, one or none before."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
