"""How a started rank joins the others: its device, its process group."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from fivefold import process
from fivefold.errors import ConfigError, Mistake
from fivefold.mesh.shared_gpu import Pause, share_gpu
from fivefold.train.machine.cpu_environment import finish_before_others, keep_freed_memory
from fivefold.train.machine.cuda_environment import (
    let_segments_grow,
    make_deterministic,
    set_defaults,
)
from fivefold.train.machine.devices import sees_own_gpu_only
from fivefold.train.ranks.fresh_store import fresh_store, keeps_store
from fivefold.train.ranks.meeting import check_interfaces, meet
from fivefold.train.ranks.rank_env import RankEnv


def init_process_group(
    env: RankEnv,
    device_type: str,
    *,
    shared: bool = False,
    timeout_seconds: float = 600.0,
    deterministic: bool = False,
    pause: Pause | None = None,
) -> torch.device:
    """Join the default process group; the same under torchrun, srun, `launch_local` and alone.

    Args:
        device_type: "cpu" (gloo), or "cuda" (NCCL, with gloo for CPU tensors).
        shared: whether the ranks of this machine share its GPUs, in turn; they send through the
            host.
        timeout_seconds: how long a collective may wait before the run counts as hung.
        deterministic: whether this process is to give the same bits every time.
        pause: called before each copy of ranks that share GPUs, in its stream, which it may hold up
            for a test.

    Returns:
        The device of this rank, made current if it is a GPU.

    Raises:
        ConfigError: this machine has fewer GPUs than ranks.
        PlaceError: ranks cannot meet.
    """
    process.work()
    if deterministic:
        make_deterministic()
    device = torch.device("cpu")
    backend = "gloo"
    if device_type == "cuda":
        set_defaults()
        device = _bind_gpu(env, shared)
        if not torch.cuda.memory_reserved(device):  # not again, for a new generation
            let_segments_grow(device)
        backend = share_gpu(device, pause) if shared else "cpu:gloo,cuda:nccl"
    else:
        keep_freed_memory()
        finish_before_others()
    timeout = timedelta(seconds=timeout_seconds)
    check_interfaces()
    dist.init_process_group(
        backend,
        timeout=timeout,
        rank=env.rank,
        world_size=env.world_size,
        store=_store(env, timeout),
        device_id=device if device.type == "cuda" and not shared else None,
    )
    if shared:  # torch takes a back end for its own only by a name in capitals
        dist.distributed_c10d._get_default_group()._set_default_backend(
            dist.ProcessGroup.BackendType.GLOO
        )
    return device


def _store(env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store in which ranks find each other."""
    match env.launcher:
        case "single":
            return dist.HashStore()
        case "local":
            place = env.master_addr, env.master_port
            store = dist.TCPStore(*place, is_master=False, timeout=timeout)
            return dist.PrefixStore(f"generation {env.generation}", store)
        case "torchrun" if keeps_store():
            return fresh_store(env, timeout)
    return meet(env, timeout)


def _bind_gpu(env: RankEnv, shared: bool) -> torch.device:
    count = torch.cuda.device_count()
    index = 0 if sees_own_gpu_only(env, count) else env.local_rank
    if shared and count:
        index %= count
    if index >= count:
        raise ConfigError(
            Mistake(
                f"{env.local_world_size} ranks on this machine, but {count} visible GPUs",
                (f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}",),
                attempt="one rank a GPU, or train on the CPU",
            )
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
