"""Where ranks run: devices, threads and processors, and how they join their group."""

from collections.abc import Sequence

import torch

from fivefold.config.config import Config
from fivefold.config.rules.graph import check_graph_device
from fivefold.expert.deepep_rules import check_deepep
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import check_kernels
from fivefold.train.machine.devices import (
    Asked,
    DeviceChoice,
    capability,
    choose_device,
    pci_addresses,
    visible_gpus,
)
from fivefold.train.machine.numa import Binding, bind, choose_bindings
from fivefold.train.machine.open_files import check_open_files
from fivefold.train.machine.threads import Threads, choose_threads
from fivefold.train.profile import check_profiler
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.rank_env import RankEnv


def choose_places(
    layout: Layout, env: RankEnv, nproc: int | None, asked: Asked
) -> tuple[DeviceChoice, Threads, Sequence[Binding]]:
    """The kind of device of each rank, its threads and its processors."""
    device = choose_device(asked, env, nproc, visible_gpus())
    check_deepep(layout.config, device.kind, shared=device.shared)
    check_profiler(layout.config.logging, device.kind)
    check_graph_device(layout.config, device.kind, shared=device.shared)
    if layout.config.training.fp8_format is not None:
        check_kernels(layout.config, capability() if device.kind == "cuda" else None)
    check_open_files(layout, device.kind)
    ranks, mode = nproc or env.local_world_size, layout.config.training.numa_binding
    bindings: Sequence[Binding] = ()
    if mode is not None:
        gpus = pci_addresses() if device.kind == "cuda" else []
        near = [gpus[rank % len(gpus)] for rank in range(ranks)] if gpus else []
        bindings = choose_bindings(mode, ranks, near)
    return device, choose_threads(layout, ranks, device.kind), bindings


def join_group(
    config: Config, env: RankEnv, device: DeviceChoice, bindings: Sequence[Binding] = ()
) -> torch.device:
    """Join the process group of all ranks, on this rank's processors; return its device."""
    training = config.training
    if bindings:  # before threads start and memory is taken; `srun` may show a rank its GPU only
        bind(bindings[env.local_rank % len(bindings)])
    return init_process_group(
        env,
        device.kind,
        shared=device.shared,
        timeout_seconds=60 * training.distributed_timeout_minutes,
        deterministic=training.deterministic_mode,
    )
