"""Settings that torch and NCCL read from the environment; what the user has set stays."""

import os
from pathlib import Path

import torch

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
GROWING = "expandable_segments:True"


def set_defaults() -> None:
    """Set what suits training, before process groups start."""
    # It warns that the messages of a group run in turn, for which `mesh.groups` makes pairs.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    # gloo carries objects only, and otherwise connects every two ranks at the start.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _set_default("TORCH_FR_BUFFER_SIZE", "2000", once="TORCH_NCCL_TRACE_BUFFER_SIZE")


def _set_default(name: str, value: str, *, once: str) -> None:
    """Set a variable unless it is set, be it by its former name, about which torch warns."""
    if once not in os.environ:
        os.environ.setdefault(name, value)


def let_segments_grow(device: torch.device) -> None:
    """Let the allocator take memory from one growing range, so that microbatches of varying size
    leave no gaps.

    Nothing changes if the driver cannot do that, as on some virtual machines.
    """
    if _grows(device):
        # NCCL would register what a graph sends as one piece of memory, which such a range is not:
        # replays would read elsewhere, or hang.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _grows(device: torch.device) -> bool:
    """Whether segments grow: as the user said, else wherever they can."""
    said = [os.environ[name] for name in ALLOCATOR if name in os.environ]
    if said:
        return any(GROWING in each for each in said)
    _set_allocator(GROWING)
    try:
        torch.empty(1, device=device)
    except RuntimeError:
        _set_allocator("expandable_segments:False")
        return False
    return True


def _set_allocator(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)


def keep_flight_record(folder: Path) -> None:
    """Have NCCL write its last 2,000 calls to `nccl-rank-N` in a folder if one of them times out.

    `torchfrtrace` compares the files of all ranks.
    """
    files = str(folder.absolute() / "nccl-rank-")
    _set_default("TORCH_FR_DUMP_TEMP_FILE", files, once="TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def make_deterministic() -> None:
    """Choose kernels and algorithms that give the same bits every time; before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")  # NVLink switches add in any order
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
