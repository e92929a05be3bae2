"""Measures one training step on this rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fivefold.audit.kept import KeptActivations
from fivefold.audit.launches import LayerLaunches
from fivefold.audit.record import RankRecord, write_record
from fivefold.audit.routed import ChosenExperts
from fivefold.audit.traffic import Traffic, axes_of
from fivefold.audit.waits import HostWaits
from fivefold.audit.watch import watching
from fivefold.audit.work import Multiplications
from fivefold.layout import Layout
from fivefold.mesh.groups import Groups
from fivefold.mesh.slices import local_tensor
from fivefold.optim.offload import HostAdamW


class Measurable(Protocol):
    """The part of `train.engine.Engine` that a measurement needs."""

    layout: Layout
    groups: Groups
    device: torch.device
    model: Any
    graphs: Any
    parameters: dict[str, nn.Parameter]
    optimizer: Any


@contextmanager
def measured(engine: Measurable, step: int, folder: Path) -> Iterator[None]:
    """Measure the step taken in the block and write the record of this rank to `folder`.

    The block runs slower than other steps, and computes the same. Compiled layers run as they were
    written: torch.compile would give up for good on code that it meets inside of a dispatch mode.
    No step is replayed, in which nothing of what is measured could be seen.

    Args:
        engine: engine that runs the step.
        step: number of the step, counted from 1.
        folder: folder for the records of all ranks.
    """
    gradients = 0.0

    def before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal gradients
        held = (p.grad for group in optimizer.param_groups for p in group["params"])
        gradients += sum(grad.nbytes for grad in held if grad is not None)

    on_gpu = engine.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(engine.device)
    hook = register_optimizer_step_pre_hook(before_update)
    traffic, work = Traffic(axes_of(engine.groups)), Multiplications()
    seq_length = engine.layout.config.training.seq_length
    kept = KeptActivations(dict(engine.model.stages), seq_length, engine.model.shared_weights)
    chosen = ChosenExperts(engine.model.stages, engine.groups)
    stages = engine.model.stages.values()
    launched = LayerLaunches([layer for stage in stages for layer in stage.transformer_layers])
    waits = HostWaits(engine.device, map(local_tensor, engine.parameters.values()))
    host = engine.optimizer.host
    before = _moved(host)
    try:
        counts = watching(kept, work, traffic, launched, waits)
        eager = torch.compiler.set_stance("force_eager")
        with engine.graphs.eagerly(), eager, chosen, counts:
            yield
    finally:
        hook.remove()
    record = RankRecord(
        rank=engine.groups.rank,
        step=step,
        world_size=engine.layout.grid.world_size,
        sent=traffic.by_axis,
        gradients=gradients,
        activations=kept.sizes,
        multiplications=work.flops,
        packed=kept.packed,
        any_packed=kept.any_packed,
        document_length=kept.document_length,
        chosen=chosen.choices,
        operations=launched.count,
        layer_operations=launched.of_a_layer,
        waits=dict(waits.places),
        peak_allocated=torch.cuda.max_memory_allocated(engine.device) if on_gpu else None,
        **_held(engine),
        **{name: now - before[name] for name, now in _moved(host).items()},
    )
    write_record(folder, record)


def _held(engine: Measurable) -> dict[str, float]:
    """The record's bytes of state that is kept from step to step."""
    host, away = engine.optimizer.host, engine.optimizer.host.weights or ()
    here = (local_tensor(p) for name, p in engine.parameters.items() if name not in away)
    tensors = {
        "parameters": here,
        "optimizer": engine.optimizer.device.held(),
        "scales": engine.model.scaling.held(),
        "rooms": host.update_buffers(),
        "host": host.tensors(),
    }
    held = {name: sum(tensor.nbytes for tensor in each) for name, each in tensors.items()}
    return held | {"disk": host.disk_bytes()}


def _moved(host: HostAdamW) -> dict[str, float]:
    """The record's bytes of copies for the optimizer, and of weights copied to the device, since
    the run began."""
    moved = {
        "to_host": host.link.to_host_bytes,
        "from_host": host.link.to_device_bytes,
        "state_moving": host.state.moving_seconds + host.link.seconds,
        "state_waited": host.state.waited_seconds + host.link.seconds,
    }
    weights = host.weights
    if weights is None:
        return moved
    return moved | {
        "brought": weights.link.to_device_bytes,
        "moving": weights.moving_seconds,
        "waited": weights.waited_seconds,
    }
