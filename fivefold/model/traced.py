"""Workarounds that torch.compile needs for autograd functions."""

import torch
from torch import Tensor


def result(y: Tensor) -> Tensor:
    """The result of an autograd function's forward that wrote into it, or that may be a view.

    While torch.compile traces, it is a copy, which the compiler fuses away: torch 2.11 takes a
    result that was written in place, or that `to` returned as it was, for one that needs no
    gradient, and all before it gets zeros.
    """
    return y.clone() if torch.compiler.is_compiling() else y
