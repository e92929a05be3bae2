"""Cross-entropy losses that save memory: the gradient overwrites the logits, or no logits are kept.

`native` computes the gradient in the forward and overwrites the logits with it. `linear` is fused
with the output layer: it computes logits for some tokens and a slice of the vocabulary at a time,
merges slices by their log-sum-exp (an online softmax: Milakov and Gimelshein 2018; as a loss:
Wijmans et al., Cut Your Losses, 2024) and recomputes logits in the backward, at 8 T H V FLOPs
instead of 6.

Shapes: T tokens, t = T / tp, H features, V padded vocabulary, v = V / tp entries of this rank.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.config.memory import LOSS_TOKENS, MemoryConfig, vocab_split_sizes
from fivefold.mesh.collectives import all_gather, start_all_reduce, start_reduce_scatter
from fivefold.mesh.device import multiply_, runs_triton
from fivefold.model.layers import Linear
from fivefold.model.leaves import local
from fivefold.model.loss import LossRule, note_z, token_weights
from fivefold.model.products import add_product
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.vocabulary import Entries, merge_statistics

log = logging.getLogger(__name__)
LOGITS_AT_A_TIME = 1 << 24
"""Logits that the native loss converts to fp32 at a time: 64 MiB."""


def install_cross_entropy(
    stage: Stage,
    memory: MemoryConfig,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    deferred: DeferredWeights,
) -> None:
    """Install the fused loss set in `memory` in a stage that holds the head.

    Raises:
        ConfigError: an environment variable of the linear loss is not a number.
    """
    if memory.cross_entropy_fusion_impl == "linear":
        splits = vocab_split_sizes(os.environ)
        stage.head_loss = LinearCrossEntropy(group, sequence_parallel, deferred, *splits)
        log.info("loss: fused with the output layer, %d entries at a time", splits[0])
        return
    stage.cross_entropy = NativeCrossEntropy(group)
    alias = " (te is the same here)" if memory.cross_entropy_fusion_impl == "te" else ""
    log.info("loss: its gradient is made in the memory of the logits%s", alias)


@dataclass(frozen=True)
class NativeCrossEntropy:
    """The `cross_entropy` seam that computes its gradient in the forward.

    Attributes:
        group: tensor-parallel group, which splits the vocabulary; None: one rank.
    """

    group: dist.ProcessGroup | None

    def __call__(
        self,
        logits_Tv: Tensor,
        labels_T: Tensor,
        rule: LossRule,
        weights_T: Tensor | None = None,
        z_sums: list[Tensor] | None = None,
    ) -> Tensor:
        """Sum of the token losses; arguments as in `model.loss.cross_entropy`.

        Overwrites the logits, so they must not be used afterwards.
        """
        rank = 0 if self.group is None else self.group.rank()
        entries = Entries(rank * logits_Tv.shape[1], rule)
        weights_T = token_weights(labels_T, weights_T, logits_Tv.dtype)
        loss: Tensor = _Native.apply(logits_Tv, labels_T, weights_T, entries, self.group, z_sums)
        return loss


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        entries: Entries,
        group: dist.ProcessGroup | None,
        z_sums: list[Tensor] | None,
    ) -> Tensor:
        at_a_time = max(LOGITS_AT_A_TIME // logits_Tv.shape[1], 1)
        whole = runs_kernels(logits_Tv)
        pieces = list(_pieces(len(logits_Tv), len(logits_Tv) if whole else at_a_time))
        own = [_statistics(entries, logits_Tv[rows], labels_T[rows]) for rows in pieces]
        losses = entries.losses(torch.cat(own, dim=1), group)
        note_z(z_sums, entries.rule.z_coeff, losses.lse_T, weights_T)
        if ctx.needs_input_grad[0]:
            for rows in pieces:
                logits, labels = logits_Tv[rows], labels_T[rows]
                grad = _gradient(entries, logits, labels, losses.lse_T[rows], weights_T[rows])
                if grad is not logits:
                    logits.copy_(grad)
            ctx.save_for_backward(logits_Tv)
        return losses.loss_T @ weights_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (grad_Tv,) = ctx.saved_tensors
        return multiply_(grad_Tv, grad), None, None, None, None, None


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The `head_loss` seam that computes logits slice by slice.

    Its weight gradient is never deferred, because the slices it is computed from exist only in the
    backward.

    Attributes:
        group: tensor-parallel group, which splits the vocabulary; None: one rank.
        sequence_parallel: whether the states are sharded along the tokens.
        deferred: knows of gradients that other uses of the weight have made.
        forward_split: vocabulary entries per slice in the forward.
        backward_split: vocabulary entries per slice in the backward.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights
    forward_split: int
    backward_split: int

    def __call__(
        self, stage: Stage, x_TH: Tensor, labels_T: Tensor, weights_T: Tensor | None
    ) -> Tensor:
        """Sum of the weighted token losses, from [T or t, H]."""
        assert stage.lm_head is not None, "the last stage has the head"
        weight_vH, bias = local(stage.lm_head.weight), stage.lm_head.bias
        bias_v = None if bias is None else local(bias)
        rank = 0 if self.group is None else self.group.rank()
        entries = Entries(rank * len(weight_vH), stage.loss_rule)
        weights_T = token_weights(labels_T, weights_T, x_TH.dtype)
        inputs = x_TH, weight_vH, bias_v, labels_T, weights_T
        loss: Tensor = _Linear.apply(*inputs, entries, self, stage.lm_head, stage.z_sums)
        return loss


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_vH: Tensor,
        bias_v: Tensor | None,
        labels_T: Tensor,
        weights_T: Tensor,
        entries: Entries,
        on: LinearCrossEntropy,
        head: Linear,
        z_sums: list[Tensor],
    ) -> Tensor:
        x_TH = all_gather(x, on.group) if on.sequence_parallel else x
        parts = []
        for rows in _pieces(len(weight_vH), on.forward_split):
            held = entries.after(rows.start)
            found = [
                _statistics(held, _logits(x_TH[tokens], weight_vH, bias_v, rows), labels_T[tokens])
                for tokens in _pieces(len(x_TH), LOSS_TOKENS)
            ]
            parts.append(torch.cat(found, dim=1))
        losses = entries.losses(merge_statistics(torch.stack(parts)), on.group)
        note_z(z_sums, entries.rule.z_coeff, losses.lse_T, weights_T)
        ctx.save_for_backward(x, weight_vH, bias_v, labels_T, weights_T, losses.lse_T)
        ctx.entries, ctx.on, ctx.parameter = entries, on, head.weight
        return losses.loss_T @ weights_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        trains = ctx.needs_input_grad[1]
        x, weight_vH, bias_v, labels_T, weights_T, lse_T = ctx.saved_tensors
        on: LinearCrossEntropy = ctx.on
        x_TH = all_gather(x, on.group) if on.sequence_parallel else x
        scale_T = grad * weights_T
        grad_weight = torch.empty_like(weight_vH) if trains else None
        wide_TH = torch.zeros_like(x_TH, dtype=lse_T.dtype)
        adds = ctx.needs_input_grad[2]
        wide_v = torch.zeros_like(bias_v, dtype=lse_T.dtype) if adds else None
        pieces = list(_pieces(len(x_TH), LOSS_TOKENS))
        for rows in _pieces(len(weight_vH), on.backward_split):
            entries, weight_cH = ctx.entries.after(rows.start), weight_vH[rows]
            summed = trains and len(pieces) > 1
            wide_cH = torch.zeros_like(weight_cH, dtype=lse_T.dtype) if summed else None
            for at in pieces:
                x_tH, logits_tc = x_TH[at], _logits(x_TH[at], weight_vH, bias_v, rows)
                grad_tc = _gradient(entries, logits_tc, labels_T[at], lse_T[at], scale_T[at])
                if wide_v is not None:
                    wide_v[rows] += grad_tc.sum(0, dtype=wide_v.dtype)
                if wide_cH is not None:
                    add_product(wide_cH, grad_tc.t(), x_tH)
                elif grad_weight is not None:
                    torch.mm(grad_tc.t(), x_tH, out=grad_weight[rows])
                add_product(wide_TH[at], grad_tc, weight_cH)
            if wide_cH is not None and grad_weight is not None:
                grad_weight[rows] = wide_cH
        start = start_reduce_scatter if on.sequence_parallel else start_all_reduce
        grad_x = start(wide_TH.to(x.dtype), on.group).wait()
        if grad_weight is not None:
            grad_weight = on.deferred.taken(ctx.parameter, grad_weight)
        grad_bias = None if wide_v is None else wide_v.to(bias_v.dtype)
        return grad_x, grad_weight, grad_bias, *[None] * 6


def _logits(x_tH: Tensor, weight_vH: Tensor, bias_v: Tensor | None, rows: slice) -> Tensor:
    """[t, c]: the logits of a slice of the vocabulary."""
    weight_Hc = weight_vH[rows].t()
    return x_tH @ weight_Hc if bias_v is None else torch.addmm(bias_v[rows], x_tH, weight_Hc)


def runs_kernels(logits: Tensor) -> bool:
    """Whether Triton's kernels compute the loss of these logits."""
    return runs_triton(logits) and logits.dtype != torch.float64


def _statistics(entries: Entries, logits_Tv: Tensor, labels_T: Tensor) -> Tensor:
    if not runs_kernels(logits_Tv):
        return entries.statistics(logits_Tv, labels_T)
    from fivefold.memory import loss_kernels

    return loss_kernels.statistics(entries, logits_Tv, labels_T)


def _gradient(
    entries: Entries, logits_Tv: Tensor, labels_T: Tensor, lse_T: Tensor, scale_T: Tensor
) -> Tensor:
    """The gradient in the dtype of the logits; a kernel writes it over them."""
    if not runs_kernels(logits_Tv):
        return entries.gradient(logits_Tv, labels_T, lse_T, scale_T).to(logits_Tv.dtype)
    from fivefold.memory import loss_kernels

    return loss_kernels.overwrite(entries, logits_Tv, labels_T, lse_T, scale_T)


def _pieces(size: int, each: int) -> Iterator[slice]:
    return (slice(start, min(start + each, size)) for start in range(0, size, each))
