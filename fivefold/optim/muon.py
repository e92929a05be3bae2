"""Muon for the matrices of the layers, AdamW for all else (Jordan et al., 2024).

An update is the orthogonal matrix nearest to the momentum, nearly: all of its directions are as
long. Factors and settings are Megatron-LM's, after Moonlight (Liu et al., 2025).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.config.training import OptimizerConfig
from fivefold.counts.matrices import Matrix, MatrixAssignment
from fivefold.mesh.collectives import start_row_exchange
from fivefold.optim.adamw import DECAYS, OF_ENDS, AdamW, Block
from fivefold.optim.rounding import MOMENTS, NamedElements

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of x, x^3 and x^5 of each iteration, found by Jordan et al. for modded-nanogpt: they
bring singular values from 0.002 on between 0.85 and 1.15 in five iterations."""
LEAST_NORM = 1e-15
"""Below it a matrix counts as zero, such as that of an expert without tokens."""


@torch.no_grad()
def orthogonalised(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """The matrix with the singular vectors of `x` and singular values close to 1, nearly.

    By Newton-Schulz iterations, which are products alone, on the short side.

    Args:
        x: [..., rows, columns], each matrix by itself.
        steps: iterations.
        dtype: type in which they multiply, and of the result.
    """
    transposed = x.shape[-2] > x.shape[-1]
    wide = x.mT if transposed else x
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_min(LEAST_NORM)
    y = torch.div(wide, norm, out=wide.new_empty(wide.shape, dtype=dtype))
    y = y.view(-1, *wide.shape[-2:])
    for a, b, c in islice(cycle(QUINTIC), steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    y = y.view(wide.shape)
    return y.mT if transposed else y


def update_factor(shape: Sequence[int], config: OptimizerConfig) -> float:
    """The factor of an orthogonal update of a matrix [..., out, in]."""
    out, into = shape[-2:]
    scales = {
        "spectral": sqrt(max(out, into)),
        "shape_scaling": sqrt(max(1.0, out / into)),
        "unit_rms_norm": sqrt(out / into),
    }
    return config.muon_extra_scale_factor * scales[config.muon_scale_mode]


Shared = tuple[Sequence[Matrix], int, dist.ProcessGroup | None]


class Holders:
    """Ranks that hold the parts of the same matrices, and gather each matrix on one of them.

    Args:
        matrices: the matrices, the same on all of the ranks, each at least in part.
        ranks: number of the ranks.
        group: their group; None: one rank.
        like: an empty tensor of the type and on the device of their parts.
        returned: type of what is made of them.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        ranks: int,
        group: dist.ProcessGroup | None,
        like: Tensor,
        returned: torch.dtype,
    ) -> None:
        self._matrices, self._group = matrices, group
        self._like, self._returned = like, returned
        self._assignment = MatrixAssignment.of(matrices, ranks)
        self._rank = 0 if group is None else group.rank()

    def each_whole(
        self,
        part_of: Callable[[str], Tensor],
        function: Callable[[Tensor], Tensor],
        take: Callable[[Matrix, Tensor], None],
    ) -> None:
        """Compute a function of each whole matrix.

        Args:
            part_of: gives this rank's part of the matrix of a name; all are of one type.
            function: gives a matrix of the same shape, or as many as it gets.
            take: gets this rank's part of each result, in any order.
        """
        for matrix in self._matrices:
            if not matrix.is_split and matrix.size(self._rank):
                take(matrix, function(part_of(matrix.name)))
        for assigned in self._assignment.rounds:
            self._round(assigned, part_of, function, take)

    def _round(
        self,
        assigned: Sequence[tuple[Matrix, int]],
        part_of: Callable[[str], Tensor],
        function: Callable[[Tensor], Tensor],
        take: Callable[[Matrix, Tensor], None],
    ) -> None:
        ranks, here = range(self._assignment.ranks), self._rank
        of: list[list[Matrix]] = [[] for _ in ranks]
        for matrix, owner in assigned:
            of[owner].append(matrix)
        whole = self._put_together(of, part_of)
        done = {m.name: function(whole.pop(m.name)) for m in of[here]}
        back = [[done[m.name][m.box(rank)] for m in of[here]] for rank in ranks]
        sizes = [[m.size(here) for m in each] for each in of]
        returned = self._exchange(self._like.to(self._returned), back, sizes)
        del done, back
        for matrices, values in zip(of, returned, strict=True):
            for matrix, value in zip(matrices, values, strict=True):
                if value.numel():
                    shape = [part.stop - part.start for part in matrix.box(here)]
                    take(matrix, value.view(shape))

    def _put_together(
        self, of: Sequence[Sequence[Matrix]], part_of: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """This rank's whole matrices, gathered from all holders."""
        here = self._rank
        sent = [[part_of(m.name) for m in each if m.sends(here)] for each in of]
        got = [[m for m in of[here] if m.sends(rank)] for rank in range(len(of))]
        sizes = [[m.size(rank) for m in each] for rank, each in enumerate(got)]
        received = self._exchange(self._like, sent, sizes)
        whole = {m.name: self._like.new_empty(m.shape) for m in of[here]}
        for rank, (matrices, values) in enumerate(zip(got, received, strict=True)):
            for matrix, value in zip(matrices, values, strict=True):
                part = whole[matrix.name][matrix.box(rank)]
                part.copy_(value.view_as(part))
        return whole

    def _exchange(
        self, like: Tensor, sent: list[list[Tensor]], sizes: list[list[int]]
    ) -> list[Sequence[Tensor]]:
        """Send each rank its tensors; returns those of the given sizes received from each."""
        assert self._group is not None, "a rank alone splits nothing"
        flat = [[tensor.reshape(-1) for tensor in each] for each in sent]
        out = like.new_empty(sum(map(sum, sizes)))
        start_row_exchange(
            torch.cat([like, *(part for each in flat for part in each)]),
            out,
            [sum(part.numel() for part in each) for each in flat],
            [sum(each) for each in sizes],
            self._group,
        ).wait()
        by_rank = out.split([sum(each) for each in sizes])
        return [values.split(each) for values, each in zip(by_rank, sizes, strict=True)]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised over whole matrices whose parts several ranks may hold.

    Its state is the mean of gradients, under the name of AdamW's first moment.

    Args:
        leaves: this rank's part of each matrix, by name; some may be empty.
        holders: with whom this rank shares its matrices.
        config: momentum and scale; weight decay is decoupled.
        dtype: type in which Newton-Schulz iterations multiply.

    Attributes:
        found_inf: where it is 1, nothing changes; None: 0.
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        holders: Sequence[Holders],
        config: OptimizerConfig,
        dtype: torch.dtype,
    ) -> None:
        self._leaves, self._holders, self._config, self._dtype = leaves, holders, config, dtype
        self.found_inf: Tensor | None = None
        of_layers = {"lr": config.lr, "weight_decay": 0.0, DECAYS: True, OF_ENDS: False}
        super().__init__([*leaves.values()], of_layers)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices; collective over all holders."""
        for leaf in self._leaves.values():
            if leaf.numel():
                self._average(leaf)
        for holders in self._holders:
            holders.each_whole(self._direction, self._orthogonalised, self._move)

    def _average(self, leaf: Tensor) -> None:
        """Add this rank's part of a gradient to its mean; the new one is free afterwards."""
        assert leaf.grad is not None
        mean = self.state[leaf][MOMENTS[0]]
        new = mean.lerp(leaf.grad, 1 - self._config.muon_momentum)
        self._put(new, mean)

    def _move(self, matrix: Matrix, update: Tensor) -> None:
        """Update this rank's part of a matrix by its part of the orthogonal one."""
        (group,) = self.param_groups
        leaf, lr = self._leaves[matrix.name], group["lr"]
        new = leaf * (1 - lr * group["weight_decay"])
        new.sub_(update, alpha=lr * update_factor(matrix.shape, self._config))
        self._put(new, leaf)

    def _direction(self, name: str) -> Tensor:
        """The matrix to orthogonalise: the mean of gradients, with Nesterov's term if set."""
        leaf = self._leaves[name]
        mean = self.state[leaf][MOMENTS[0]]
        if not self._config.muon_nesterov or not leaf.numel():
            return mean
        assert leaf.grad is not None
        return leaf.grad.lerp(mean, self._config.muon_momentum)

    def _orthogonalised(self, whole: Tensor) -> Tensor:
        return orthogonalised(whole, self._config.muon_num_ns_steps, self._dtype)

    def _put(self, new: Tensor, old: Tensor) -> None:
        """Overwrite a tensor, unless something infinite was found."""
        if self.found_inf is None:
            old.copy_(new)
        else:
            torch.where(self.found_inf > 0, old, new, out=old)


class MuonAdamW(AdamW):
    """Muon for the matrices of the layers, AdamW for all other parameters.

    Args:
        parameters: as for `AdamW`.
        config: settings of both.
        matrices: matrices that several ranks may hold in parts, with the number of these ranks and
            their group: of experts, and all others.
        dtype: type in which Newton-Schulz iterations multiply.
        blocks: as for `AdamW`.
        places: as for `AdamW`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        matrices: Sequence[Shared],
        dtype: torch.dtype,
        blocks: Sequence[Block] = (),
        places: Mapping[str, NamedElements] | None = None,
    ) -> None:
        self._shared, self._dtype = matrices, dtype
        self._orthogonal = {matrix.name for each, _, _ in matrices for matrix in each}
        super().__init__(parameters, config, blocks, places)

    def _moments(self, name: str, leaf: Tensor, config: OptimizerConfig) -> dict[str, Tensor]:
        moments = super()._moments(name, leaf, config)
        kept = MOMENTS[:1] if name in self._orthogonal else MOMENTS
        return {state: moments[state] for state in kept}

    def _optimizers(self, names: Sequence[str], config: OptimizerConfig) -> list[Any]:
        others = [name for name in names if name not in self._orthogonal]
        leaves = {name: self._leaves[name] for name in names if name in self._orthogonal}
        if not leaves:
            return super()._optimizers(others, config)
        like = next(iter(leaves.values())).detach().new_empty(0)
        holders = [
            Holders([m for m in each if m.name in leaves], ranks, group, like, self._dtype)
            for each, ranks, group in self._shared
        ]
        muon = Muon(leaves, holders, config, self._dtype)
        for name, leaf in leaves.items():
            muon.state[leaf] = self._state[name]
        return [*super()._optimizers(others, config), muon]
