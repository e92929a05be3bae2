"""Installs expert parallelism in the seams of a stage."""

from collections.abc import Callable, Mapping

from torch.distributed.tensor import Replicate, Shard

from fivefold.config.parallel import TokenDispatcher
from fivefold.expert.deepep import DeepEPDispatch, Kernels
from fivefold.expert.dispatch import AllToAllDispatch, FlexDispatch, GatherDispatch
from fivefold.mesh.collectives import all_gather, all_reduce, group_size
from fivefold.mesh.groups import ExpertGroups
from fivefold.mesh.slices import distributed
from fivefold.model.moe.grouped import GroupedLinear
from fivefold.model.moe.layer import Dispatcher, Experts
from fivefold.model.moe.routing import RouterGroups
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.grouped import GroupedMultiply


def install_experts(
    stage: Stage,
    kind: TokenDispatcher,
    groups: ExpertGroups,
    overlaps: bool,
    deferred: DeferredWeights,
    dims: Mapping[str, int | None],
    kernels: Kernels | None,
    meanwhile: Callable[[], None] | None,
) -> None:
    """Split the experts of a stage (still on the meta device) and install their communication.

    Args:
        stage: stage, without parallelism or with tensor parallelism installed.
        kind: token dispatcher.
        groups: process groups of experts.
        overlaps: whether shared experts run during dispatch and combine.
        deferred: receives deferred weight gradients of grouped linears.
        dims: parameter name -> the dim that ranks of an expert split; None: none.
        kernels: DeepEP's kernels that send tokens; None: collectives send them.
        meanwhile: function called before waiting for rows; None: nothing.
    """
    around = _surroundings(groups)
    for layer in stage.mixtures:
        layer.router.surroundings, layer.overlaps = around, overlaps
        settings = layer.router.settings
        pads = settings.moe_pad_expert_input_to_capacity
        if groups.both is not None or pads or settings.moe_expert_rank_capacity_factor is not None:
            layer.dispatch = _dispatcher(kind, groups, kernels, meanwhile)
        layer.experts.adds_bias = groups.etp is None or groups.etp.rank() == 0
    multiply = GroupedMultiply(deferred)
    for module in stage.modules():
        if isinstance(module, GroupedLinear):
            module.multiply = multiply
    if groups.both is not None:
        _distribute(stage, groups, dims)


def _dispatcher(
    kind: TokenDispatcher,
    groups: ExpertGroups,
    kernels: Kernels | None,
    meanwhile: Callable[[], None] | None,
) -> Dispatcher:
    if kernels is not None:
        return DeepEPDispatch(kernels, groups.etp, meanwhile)
    if kind == "allgather" and groups.both is not None:
        index = 0 if groups.ep is None else groups.ep.rank()
        return GatherDispatch(groups.both, index, group_size(groups.ep))
    return (FlexDispatch if kind == "flex" else AllToAllDispatch)(groups.ep, groups.etp, meanwhile)


def _surroundings(groups: ExpertGroups) -> RouterGroups:
    microbatch, stage = groups.microbatch, groups.stage
    return RouterGroups(
        microbatch=lambda x: all_reduce(x, microbatch),
        batch=lambda x: all_reduce(x, stage),
        gather=lambda x: all_gather(x, microbatch),
        index=0 if microbatch is None else microbatch.rank(),
        ranks=group_size(microbatch),
        all_ranks=group_size(groups.stage),
        expert_ranks=group_size(groups.ep),
    )


def _distribute(stage: Stage, groups: ExpertGroups, dims: Mapping[str, int | None]) -> None:
    """Replace every expert parameter by a DTensor of the same global shape."""
    mesh = groups.split_mesh
    assert mesh is not None
    names = {parameter: name for name, parameter in stage.named_parameters()}
    experts = [module for module in stage.modules() if isinstance(module, Experts)]
    for module in (inner for each in experts for inner in each.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = dims[names[parameter]]
            own = parameter.detach().chunk(mesh.size(0), 0)[0]
            if dim is not None:
                own = own.chunk(mesh.size(1), dim)[0]
            placements = [Shard(0), Replicate() if dim is None else Shard(dim)]
            setattr(module, name, distributed(parameter, own.contiguous(), mesh, placements))
