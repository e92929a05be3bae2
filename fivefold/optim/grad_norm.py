"""The exact norm of a gradient distributed over all ranks, and gradient clipping."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.device import uses_gpu_kernels
from fivefold.mesh.slices import local_tensor

_PIECE = 1 << 15  # elements


@torch.no_grad()
def global_grad_norm(
    grads: Sequence[tuple[Tensor, bool]],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    *,
    vouches: Sequence[Tensor] | None = None,
) -> Tensor:
    """Euclidean norm of the whole gradient, every element counted once; fp64 scalar.

    One all-reduce of 8 bytes. Squares are summed in fp64 whatever the dtype of the gradients, so
    that the norm does not depend on the sharding.

    Args:
        grads: (local reduced gradient, whether this rank counts it) pairs.
        group: ranks that together hold the gradient, each rank once; None: this rank alone.
        device: device of the result (default: that of the first gradient).
        vouches: further tensors to check: the norm is NaN on every rank if one of these, or of the
            uncounted gradients, is not finite on any rank. None: check counted gradients only.
    """
    counted = [local_tensor(grad) for grad, counts in grads if counts and grad.numel()]
    device = device or (grads[0][0].device if grads else "cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total += _sum_of_squares(counted, total.device)
    if vouches is not None:
        uncounted = [local_tensor(grad) for grad, counts in grads if not counts]
        total += zero_if_finite([*uncounted, *vouches], total.device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def zero_if_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """0 if every element of every tensor is finite, else NaN; fp64 scalar, not synchronised."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Unlike a sum, the largest magnitude cannot overflow. On the CPU, aminmax is five times as fast
    # as the norm.
    if uses_gpu_kernels(full[0]):
        largest = list(torch._foreach_norm(full, float("inf")))
    else:
        largest = [extreme for tensor in full for extreme in torch.aminmax(tensor)]
    return torch.stack([norm.to(device, torch.float64) for norm in largest]).mul_(0.0).sum()


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares, fp64 scalar. On the CPU in cache-sized pieces, which is twice as fast."""
    if uses_gpu_kernels(tensors[0]):
        norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
        return torch.stack([norm.to(device) for norm in norms]).square().sum()
    pieces = [piece for tensor in tensors for piece in tensor.reshape(-1).split(_PIECE)]
    wide = (piece.double() for piece in pieces)
    return torch.stack([torch.dot(piece, piece) for piece in wide]).sum().to(device)


@torch.no_grad()
def clip_(
    grads: Sequence[Tensor], norm: Tensor, max_norm: float, found_inf: Tensor | None = None
) -> None:
    """Scale gradients in place by min(1, max_norm / (norm + 1e-6)), as Megatron-LM does.

    Does not synchronise with the device.

    Args:
        grads: plain tensors or DTensors.
        norm: global norm of all gradients.
        max_norm: norm above which gradients are scaled.
        found_inf: where it is 1, gradients stay unchanged; None: 0.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if found_inf is not None:
        scale = scale.masked_fill(found_inf > 0, 1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(local_tensor, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), alike in by_kind.items():
        torch._foreach_mul_(alike, scale.to(device, dtype))
