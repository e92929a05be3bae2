"""The exact norm of a gradient distributed over all ranks, and gradient clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.device import multiply_, uses_gpu_kernels
from fivefold.mesh.slices import local_tensor

_PIECE = 1 << 16
"""Numbers that a CPU takes at a time: half a megabyte in fp64."""


@dataclass(frozen=True)
class NormTerm:
    """Contribution to the norm of a gradient that has been copied off the device.

    Attributes:
        term: what it adds to the sum of squares, 1-D fp64: its own if this rank counts it, none if
            it is empty; if not, a zero, or a NaN if it is not finite.
    """

    term: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, grad: Tensor, *, counts: bool) -> "NormTerm":
        """Measure a gradient before it leaves."""
        if not counts:
            return cls(zero_if_finite([grad], grad.device).reshape(1))
        return cls(_squares([grad])[0] if grad.numel() else grad.new_zeros(0, dtype=torch.float64))


@torch.no_grad()
def global_grad_norm(
    grads: Sequence[tuple[Tensor | NormTerm, bool]],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    *,
    vouches: Sequence[Tensor] | None = None,
) -> Tensor:
    """Euclidean norm of the whole gradient, every element counted once; fp64 scalar.

    One all-reduce of 8 bytes. Squares are summed in fp64 whatever the dtype of the gradients, so
    that the norm does not depend on the sharding.

    Args:
        grads: (local reduced gradient, or what is known of one that has left, whether this rank
            counts it) pairs.
        group: ranks that together hold the gradient, each rank once; None: this rank alone.
        device: device of the result (default: that of the first gradient).
        vouches: further tensors to check: the norm is NaN on every rank if one of these, or of the
            uncounted gradients, is not finite on any rank. None: check counted gradients only.
    """
    terms, uncounted = _terms(grads)
    device = device or (terms[0].device if terms else "cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    if terms:
        total += torch.cat(terms).sum().to(device)
    if vouches is not None:
        there = [grad for grad in uncounted if isinstance(grad, Tensor)]
        total += zero_if_finite([*there, *vouches], total.device)
        for grad in uncounted:
            if isinstance(grad, NormTerm):
                total += grad.term[0]
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def zero_if_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """0 if every element of every tensor is finite, else NaN; fp64 scalar, not synchronised."""
    # Few operations know numbers of 8 bits; scales of such are integers.
    full = [
        tensor.bfloat16() if tensor.itemsize == 1 else tensor
        for tensor in tensors
        if tensor.numel() and tensor.is_floating_point()
    ]
    if not full:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Unlike a sum, the largest magnitude cannot overflow. On the CPU, aminmax is five times as fast
    # as the norm.
    if uses_gpu_kernels(full[0]):
        largest = list(torch._foreach_norm(full, float("inf")))
    else:
        largest = [extreme for tensor in full for extreme in torch.aminmax(tensor)]
    return torch.stack([norm.to(device, torch.float64) for norm in largest]).mul_(0.0).sum()


def _terms(
    grads: Sequence[tuple[Tensor | NormTerm, bool]],
) -> tuple[list[Tensor], list[Tensor | NormTerm]]:
    """The terms of the sum of squares in order, and the gradients that this rank does not count."""
    local = [(g if isinstance(g, NormTerm) else local_tensor(g), counts) for g, counts in grads]
    full = [g for g, counts in local if counts and isinstance(g, Tensor) and g.numel()]
    squares = iter(_squares(full) if full else [])
    terms = []
    for grad, counts in local:
        if counts and isinstance(grad, NormTerm):
            terms.append(grad.term)
        elif counts and isinstance(grad, Tensor) and grad.numel():
            terms.append(next(squares))
    return terms, [grad for grad, counts in local if not counts]


def _squares(tensors: list[Tensor]) -> list[Tensor]:
    """The sum of squares of each tensor, [1] fp64: a GPU reads each once, a CPU copies one piece
    after the other in fp64."""
    whole = uses_gpu_kernels(tensors[0])
    pieces = [(t,) if whole else t.reshape(-1).split(_PIECE) for t in tensors]
    norms = torch._foreach_norm(list(chain(*pieces)), 2, dtype=torch.float64)
    squares = torch.stack(list(norms)).square()
    parts = squares.split(list(map(len, pieces)))
    return [part if len(part) == 1 else part.sum(0, keepdim=True) for part in parts]


@torch.no_grad()
def clip_(
    grads: Sequence[Tensor],
    norm: Tensor,
    max_norm: float,
    found_inf: Tensor | None = None,
    *,
    loss_scale: float | None = None,
) -> None:
    """Scale gradients in place by min(1, max_norm / (norm + 1e-6)), as Megatron-LM does.

    And undo the scale of the loss that they are of.

    Does not synchronise with the device.

    Args:
        grads: plain tensors or DTensors.
        norm: global norm of all gradients, of a loss without scale.
        max_norm: norm above which gradients are scaled; 0: none is.
        found_inf: where it is 1, gradients stay unchanged; None: 0.
        loss_scale: factor of the loss; None: 1.
    """
    if max_norm == 0 and loss_scale is None:
        return
    limit = max_norm or math.inf
    scale = (limit / (norm + 1e-6)).clamp(max=1.0) / (loss_scale or 1.0)
    if found_inf is not None:
        scale = scale.masked_fill(found_inf > 0, 1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(local_tensor, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), alike in by_kind.items():
        exact = torch.promote_types(dtype, torch.float32)
        factor = scale.to(device, exact)
        if dtype == exact:
            torch._foreach_mul_(alike, factor)
        else:  # a foreach product would round the factor to the gradients' type
            for grad in alike:
                multiply_(grad, factor)
