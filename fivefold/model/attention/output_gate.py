"""Gates of attention's output, which the query projection computes.

Shapes: T tokens, F features of this rank's query heads, D features of one.
"""

from typing import Any

import torch
from torch import Tensor

from fivefold.model.traced import result


def split_gate(both_TF: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Split a projection [T, 2 F], head by head, into queries and gates [T, F].

    They are copies, so that neither keeps the other's memory alive.
    """
    query, gate = both_TF.unflatten(1, (-1, 2, head_dim)).unbind(2)
    return query.flatten(1), gate.flatten(1)


def gated_output(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    """x times sigmoid(gate), in at least fp32."""
    y: Tensor = _GatedOutput.apply(x_TF, gate_TF)
    return y


class _GatedOutput(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        wide = torch.promote_types(x.dtype, torch.float32)
        return result(gate.to(wide).sigmoid().mul_(x).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        opened = gate.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
        of_x = grad * opened
        of_gate = (of_x * x).mul_(1 - opened)
        return of_x.to(x.dtype), of_gate.to(gate.dtype)
