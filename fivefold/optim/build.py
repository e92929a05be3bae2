"""Builds the optimizer of a rank: where its state is, and when gradients are copied to the host."""

from collections.abc import Mapping
from pathlib import Path

import torch

from fivefold.counts.matrices import layer_matrices
from fivefold.data_parallel.fsdp import ShardedStage
from fivefold.data_parallel.policy import DTYPES, make_policy
from fivefold.memory.host import HostLink
from fivefold.mesh.slices import piece_of
from fivefold.optim.adamw import AdamW
from fivefold.optim.loss_scale import LossScaler
from fivefold.optim.muon import MuonAdamW, Shared
from fivefold.optim.offload import HostAdamW
from fivefold.optim.optimizer import Optimizer
from fivefold.optim.rounding import NamedElements
from fivefold.parallel_model import ParallelModel


def build_optimizer(model: ParallelModel, device: torch.device, scaler: LossScaler) -> Optimizer:
    """The optimizer of a rank's parameters.

    A gradient that FSDP2 has reduced is copied to the host at once, unless further sums follow.
    """
    config, parameters = model.layout.config, model.parameters()
    seed, policy = config.training.seed, make_policy(config)
    places = {
        name: NamedElements(seed, model.records[name].stored, tuple(piece.shape), piece.slices)
        for name, piece in ((name, piece_of(p)) for name, p in parameters.items())
    }
    offloaded = {name: p for name, p in parameters.items() if name in model.on_host}
    folder = config.memory.optimizer_offload_path
    host = HostAdamW(
        offloaded,
        {name: model.records[name].counted for name in offloaded},
        config.optimizer,
        policy.master_dtype,
        policy.gradient_dtype,
        HostLink(device),
        places,
        None if folder is None else Path(folder),
        model.offloaded,
        on_device=config.memory.offload_optimizer_states,
    )
    for index, gradients in model.gradients.items():
        if offloaded or policy.gradient_dtype != policy.master_dtype:
            gradients.set_gradient_type()
        if offloaded and isinstance(gradients, ShardedStage):
            for name, _ in model.stages[index].named_parameters():
                if name in offloaded:
                    host.offload_when_reduced(name, whole=len(model.records[name].sums) == 1)
    return Optimizer(parameters, _on_device(model, places), host, scaler)


def _on_device(model: ParallelModel, places: Mapping[str, NamedElements]) -> AdamW:
    """The optimizer of parameters whose state is on the device."""
    config = model.layout.config
    here = {name: p for name, p in model.parameters().items() if name not in model.on_host}
    early = config.parallel.overlap_param_gather_with_optimizer_step
    blocks = [*model.blocks()] if early else ()
    if config.optimizer.optimizer != "muon":
        return AdamW(here, config.optimizer, blocks, places)
    dtype = DTYPES[config.training.muon_precision]
    return MuonAdamW(here, config.optimizer, _shared_matrices(model), dtype, blocks, places)


def _shared_matrices(model: ParallelModel) -> list[Shared]:
    """The matrices that Muon updates, with the ranks that hold their parts."""
    experts = model.groups.experts
    groups = {False: model.groups.holders, True: None if experts is None else experts.holders}
    return [
        (matrices, ranks, groups[of_experts])
        for of_experts, (ranks, matrices) in layer_matrices(
            model.layout, model.records.values()
        ).items()
    ]
