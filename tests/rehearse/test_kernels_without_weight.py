"""Kernels of a rehearsal stand in for norms without weights, too."""

import torch
import torch.nn.functional as F

from fivefold.rehearse.kernels import one_kernel_each


def test_a_norm_without_a_weight_is_rehearsed_forward_and_backward() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    with one_kernel_each():
        F.rms_norm(x, (4,), None, 1e-5).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
