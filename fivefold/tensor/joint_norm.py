"""Norms over all query heads of a token, and over all its key heads, which ranks split.

Ranks sum two numbers for each token, its squares of queries and of keys, and two in the backward.
Shapes: T tokens, F features of this rank's heads.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.mesh.collectives import all_reduce
from fivefold.model.norms import RMSNorm


class JointHeadNorm:
    """The `norm_together` seam of attention.

    Args:
        group: ranks that split the heads.
        model: gives the heads; if there are fewer key heads than ranks, some hold the same.
    """

    def __init__(self, group: dist.ProcessGroup, model: ModelConfig) -> None:
        self._group, self._sizes = group, (model.q_size, model.k_size)
        self._holders = max(group.size() // model.num_kv_heads, 1)

    def __call__(
        self, q_norm: RMSNorm, k_norm: RMSNorm, q_TF: Tensor, k_TF: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[T, F] each, normalised over the heads of all ranks."""
        query_weight, key_weight = q_norm.factor, k_norm.factor
        assert key_weight is not None, "norms of heads have weights"
        if self._holders > 1:  # each rank holds the weight of all heads, and uses one
            head = self._group.rank() // self._holders
            key_weight = key_weight.unflatten(0, (-1, k_TF.shape[1]))[head]
        holders = 1, self._holders
        rule = _Rule(self._group, q_norm.epsilon, q_norm.offset, self._sizes, holders)
        q_TF, k_TF = _NormedTogether.apply(q_TF, k_TF, query_weight, key_weight, rule)
        return q_TF, k_TF


class _Rule(NamedTuple):
    """The common rule of both norms, and their sizes.

    Attributes:
        group: ranks that split the heads.
        epsilon: added to the mean square.
        offset: added to the weights.
        sizes: features of all query heads, and of all key heads.
        holders: ranks that have the same queries, and those that have the same keys.
    """

    group: dist.ProcessGroup
    epsilon: float
    offset: float
    sizes: tuple[int, int]
    holders: tuple[int, int]

    def means(self, sums: list[Tensor]) -> list[Tensor]:
        """Sums [T] over this rank's queries and keys -> means [T, 1] over those of all ranks."""
        every = all_reduce(torch.stack(sums), self.group)
        sizes = [size * holders for size, holders in zip(self.sizes, self.holders, strict=True)]
        return [sum_T[:, None] / size for sum_T, size in zip(every, sizes, strict=True)]


class _NormedTogether(torch.autograd.Function):
    """Autograd function that keeps queries and keys, and one number of each per token.

    Of a key that several ranks have, each has a part of the gradient: means of these parts are
    divided by the ranks once more, so that the parts add up.
    """

    @staticmethod
    def forward(
        ctx: Any, q_TF: Tensor, k_TF: Tensor, q_weight: Tensor, k_weight: Tensor, rule: _Rule
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q_TF.dtype, torch.float32)
        both, weights = (q_TF, k_TF), (q_weight, k_weight)
        squares = [torch.linalg.vecdot(x, x) for x in (x.to(wide) for x in both)]
        scales = [(mean + rule.epsilon).rsqrt_() for mean in rule.means(squares)]
        ctx.save_for_backward(*both, *weights, *scales)
        ctx.rule = rule
        q_TF, k_TF = (
            (x * scale).mul_(weight.to(wide) + rule.offset).to(x.dtype)
            for x, weight, scale in zip(both, weights, scales, strict=True)
        )
        return q_TF, k_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rule, saved = ctx.rule, ctx.saved_tensors
        both, weights, scales = saved[:2], saved[2:4], saved[4:]
        normed = [x * scale for x, scale in zip(both, scales, strict=True)]
        products = [grad * x for grad, x in zip(grads, normed, strict=True)]
        factors = [w.to(x.dtype) + rule.offset for w, x in zip(weights, normed, strict=True)]
        means = rule.means([p @ factor for p, factor in zip(products, factors, strict=True)])
        of_both = [
            (grad * factor).addcmul_(x, mean, value=-1.0).mul_(scale).to(grad.dtype)
            for grad, factor, x, mean, scale in zip(
                grads, factors, normed, means, scales, strict=True
            )
        ]
        of_weights = [p.sum(0).to(w.dtype) for p, w in zip(products, weights, strict=True)]
        return *of_both, *of_weights, None
