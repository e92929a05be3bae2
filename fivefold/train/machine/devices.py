"""Chooses the kind of device that the ranks of this machine train on."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

from fivefold.errors import Mistake, PlaceError
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import several

AMPERE = (8, 0)
Asked = Literal["auto", "cpu", "cuda"]
T = TypeVar("T")


@dataclass(frozen=True)
class DeviceChoice:
    """The device of every rank.

    Attributes:
        kind: "cpu" or "cuda".
        why: reason for it.
        shared: whether ranks share GPUs.
    """

    kind: str
    why: str
    shared: bool = False


def visible_gpus() -> int:
    """Number of GPUs that this process sees."""
    import torch

    return _asked_apart(torch.cuda.device_count, 0)


def capability() -> tuple[int, int]:
    """Compute capability of the GPUs, read from the first one."""
    import torch

    return _asked_apart(torch.cuda.get_device_capability, (0, 0))


def lacks_units(precision: str, capability: tuple[int, int]) -> str:
    """A warning if GPUs of this capability have no units for a precision; else empty."""
    if precision != "bf16" or capability >= AMPERE:
        return ""
    sm = ".".join(map(str, capability))
    return f"GPUs of sm {sm} have no units that multiply bf16, but some that multiply fp16: --fp16"


def pci_addresses() -> list[str]:
    """PCI address of each visible GPU, as in /sys/bus/pci/devices."""
    import torch

    def addresses() -> list[str]:
        seen: list[Any] = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
        return [
            f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
            for gpu in seen
        ]

    return _asked_apart(addresses, [])


def _asked_apart(question: Callable[[], T], otherwise: T) -> T:
    """What CUDA answers a forked child; `otherwise` without CUDA.

    If this process itself asked, CUDA would refuse to work in the ranks that it forks.
    """
    import torch

    from fivefold.train.ranks.children import leave_signals_to_parent
    from fivefold.train.ranks.signals import held_back

    if not torch.backends.cuda.is_built():
        return otherwise
    context = get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    parent = os.getpid()

    def answers() -> None:
        leave_signals_to_parent(parent)
        writing.send(question())

    child = context.Process(target=answers)
    with held_back():
        child.start()
    writing.close()
    try:
        answer: T = reading.recv()
    except EOFError:  # the driver ended the child
        answer = otherwise
    child.join()
    return answer


def choose_device(asked: Asked, env: RankEnv, nproc: int | None, gpus: int) -> DeviceChoice:
    """Choose the kind of device.

    Only ranks that this command starts itself fall back to the CPU or, where GPUs are asked for,
    share them.

    Args:
        asked: what the user asked for.
        env: rank of this process.
        nproc: number of ranks that this command starts; None: one, or a launcher started them.
        gpus: number of GPUs that this process sees.

    Raises:
        PlaceError: a GPU was asked for, and there is none; or there are too few for a launcher's
            ranks.
    """
    started = env.launcher not in ("single", "local")
    ranks = env.local_world_size if started else nproc or 1
    if asked == "cpu":
        return DeviceChoice("cpu", "--device cpu")
    if asked == "auto" and not gpus:
        return DeviceChoice("cpu", "no GPU is visible")
    if gpus >= ranks:
        return DeviceChoice("cuda", f"{_gpus(gpus)} visible, {ranks} needed")
    if sees_own_gpu_only(env, gpus):
        return DeviceChoice("cuda", f"one GPU visible to each of {ranks} ranks")
    if asked == "cuda" and gpus and not started:
        share = f"{ranks} ranks share {several(gpus, 'GPU')}, and send through the host"
        return DeviceChoice("cuda", f"{share}: for proofs, not for speed", shared=True)
    needed = "the rank needs a GPU" if ranks == 1 else f"{ranks} ranks here need a GPU each"
    short = f"{needed}, and {_gpus(gpus)} visible"
    if asked == "auto" and not started:
        return DeviceChoice("cpu", short)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "(not set)")
    why = (f"CUDA_VISIBLE_DEVICES={visible}",)
    raise PlaceError(Mistake(short, why, works=("--device cpu",)))


def sees_own_gpu_only(env: RankEnv, gpus: int) -> bool:
    """Whether the one visible GPU is this rank's own: `srun --gpus-per-task 1` hides the others."""
    return env.launcher == "slurm" and gpus == 1


def _gpus(count: int) -> str:
    return f"{several(count, 'GPU')} {'is' if count == 1 else 'are'}" if count else "no GPU is"
