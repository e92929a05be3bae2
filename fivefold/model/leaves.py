"""This rank's part of a parameter as a leaf of autograd, and the way of its gradient back.

Layers compute on plain tensors. `DTensor.to_local` would give them one, but each of its calls, the
DTensor that its backward makes, and autograd's sum of DTensors cost the host more than the layer's
own operations. So a parameter that is a DTensor gets a leaf, made once: a plain tensor in its
memory. A gradient that arrives there is moved to `parameter.grad`, where everybody looks for it.
"""

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.mesh.slices import laid_out_like, local_tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, to compute with; its gradient arrives at
    `parameter.grad`."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling():  # a compiler sees through DTensors, and through no hook
        return parameter.to_local()
    leaf: Tensor | None = getattr(parameter, "_leaf", None)
    return _make_leaf(parameter) if leaf is None else leaf


def keep_gradients_in(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let autograd make and accumulate a parameter's gradients in a type that may differ from its
    own."""
    for tensor in (parameter, getattr(parameter, "_leaf", parameter)):
        tensor.grad_dtype = dtype


def when_accumulated(parameter: Tensor, hook: Callable[[], None]) -> None:
    """Call `hook` each time a backward has added to `parameter.grad`, by whichever path."""
    parameter.register_post_accumulate_grad_hook(lambda _: hook())
    if isinstance(parameter, DTensor):
        local(parameter).register_post_accumulate_grad_hook(lambda _: hook())


def held_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of `parameter.grad`, without autograd; None if there is no gradient yet."""
    held = parameter.grad
    # `to_local` would enter autograd first.
    return held._local_tensor if isinstance(held, DTensor) else held


def add_to_grad(parameter: Tensor, grad: Tensor, rows: slice | None = None) -> None:
    """Add a local gradient to `parameter.grad` as autograd would.

    Args:
        parameter: plain tensor or DTensor.
        grad: gradient, shaped like the parameter's local part or its `rows`.
        rows: rows of the local part that the gradient covers; None: all.
    """
    held = held_gradient(parameter)
    if held is not None:
        (held if rows is None else held[rows]).add_(grad)
        return
    if rows is not None:
        whole = grad.new_zeros(local(parameter).shape)
        whole[rows] = grad
        grad = whole
    if parameter.grad_dtype is not None:
        grad = grad.to(parameter.grad_dtype)
    parameter.grad = laid_out_like(parameter, grad)


def _make_leaf(parameter: DTensor) -> Tensor:
    """Make the leaf and store it on the parameter, since FSDP2 creates its own parameters."""
    leaf = local_tensor(parameter).requires_grad_(parameter.requires_grad)
    leaf.grad_dtype = parameter.grad_dtype
    owner = ref(parameter)  # autograd's hooks are hidden from the collector of cycles

    def move(leaf: Tensor) -> None:
        grad, leaf.grad, parameter = leaf.grad, None, owner()
        if grad is not None and parameter is not None:  # none arrives where a backward defers it
            add_to_grad(parameter, grad)

    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(move)
    parameter._leaf = leaf  # type: ignore[attr-defined]
    return leaf
