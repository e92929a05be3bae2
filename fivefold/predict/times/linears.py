"""Predicts the times of linear layers and of their tensor-parallel communication.

Times are for one microbatch and split by cause.
"""

from collections.abc import Callable
from functools import cached_property, partial

from fivefold.description.weights import Weight
from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Software
from fivefold.predict.times.communication import all_reduce, gather, span
from fivefold.predict.times.compute import (
    CAST,
    RECIPE_RATE,
    Phases,
    elementwise,
    matmul,
    overlapped,
)
from fivefold.predict.times.stage import Times

ELEMENT = 2.0  # bytes of an activation in bf16, whatever precision multiplies
ADDED = 8.0  # bytes an element to add a gradient to a sum by a separate kernel


class LinearTimes:
    """The times of a layout's linear layers on a cluster; nothing changes after construction.

    Args:
        layout: layout of the run.
        cluster: cluster that runs it.
        software: framework and kernels.
    """

    def __init__(self, layout: Layout, cluster: Cluster, software: Software) -> None:
        config, grid, training = layout.config, layout.grid, layout.config.training
        self.layout, self.config = layout, config
        self.cluster, self.software = software.on(cluster), software
        self.gpu = self.cluster.gpu
        self.model, self.parallel, self.grid = config.model, config.parallel, grid
        self.memory, self.training = config.memory, training
        self.tokens, self.parts = config.rank_tokens, config.parallel.token_parts
        self.precision = config.product_precision
        self.tp = span(cluster, grid.tp, 1)
        overlaps = self.parallel.tp_comm_overlap and self.parts > 1
        self.in_parts = overlaps and software.hidden_tp is None
        self.hidden_tp = (software.hidden_tp or 0.0) if overlaps else 0.0
        pipelined = self.parallel.pipeline_model_parallel_size > 1
        splits = self.parallel.pipeline_dx_first or layout.defers_weights
        self.defers = pipelined and splits and software.eager_dx is not False

    @cached_property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden state of a microbatch's tokens in one tensor-parallel group."""
        return self.tokens * self.model.hidden_size * ELEMENT

    def _linear(
        self,
        weight: tuple[int, ...],
        tokens: int,
        batch: int = 1,
        precision: str | None = None,
    ) -> Phases:
        """A linear layer [out, in] on `tokens` rows; with `batch`, that many such layers."""
        (n, k), gpu, kind = weight, self.gpu, precision or self.precision
        forward = matmul(gpu, tokens, n, k, kind, batch)
        dx = matmul(gpu, tokens, k, n, kind, batch)
        dw = matmul(gpu, n, k, tokens, kind, batch, 8.0)  # accumulates in fp32
        if kind in ("fp8", "fp4"):
            recipe = "nvfp4" if kind == "fp4" else self.training.fp8_recipe
            share, cast = RECIPE_RATE[recipe], CAST[recipe]
            forward, dx, dw = forward / share, dx / share, dw / share
            forward += elementwise(gpu, cast * batch * tokens * k)
            dx += elementwise(gpu, cast * batch * tokens * n)
        if self.software.accumulates_apart == "always":
            dw += elementwise(gpu, batch * n * k * ADDED)
        return Phases(forward, dx, dw)

    def _joined(self, rows: list[int], tokens: int, inputs: int) -> Phases:
        """Linear layers of one input with these numbers of outputs, in one multiplication or one
        each."""
        parts = [sum(rows)] if self.software.joins_linears else rows
        return sum((self._linear((n, inputs), tokens) for n in parts), Phases())

    def _projection(self, weight: tuple[int, ...]) -> Times:
        """A projection of two hidden states to one: a column-parallel layer whose features are
        gathered, or exchanged for tokens."""
        times = self._column(partial(self._linear, weight), inputs=2)
        if self.grid.tp == 1:
            return times
        moved = gather(self.cluster, self.tp, self.hidden_bytes / self.parts)
        return times + Times(tp=Phases(moved, moved if self.parallel.sequence_parallel else 0.0))

    def _column(
        self, linear_on: Callable[[int], Phases], inputs: float = 1, each: int = 1
    ) -> Times:
        """A column-parallel linear layer: X is gathered before it, dX is reduced after.

        A deferred dW is no work beside which dX could be reduced; its X is gathered ahead, while
        another dW is computed, which is taken to be as long.

        Args:
            linear_on: gives the times of the layer on a number of tokens.
            inputs: hidden states that X is made of.
            each: how often X is gathered and dX reduced; kernels that are fused share one X.
        """
        linear = self._multiplied(linear_on)
        if self.grid.tp == 1:
            return Times(linear)
        whole = inputs * self.hidden_bytes
        if self.parallel.sequence_parallel:
            move = gather(self.cluster, self.tp, whole)
            forward = self._beside(linear.forward, move * (1 if self.software.fused else each))
            dx = self._beside(linear.dx, move * each)
            if not self.software.overlaps_backward_tp:
                return Times(linear, tp=Phases(forward, dx))
            free = linear.dw
            if not self.defers:
                dx = overlapped(self.gpu, linear.dx, move)  # X, gathered again for dW
                free += max(0.0, self._others(linear.dx) - move)
            return Times(linear, tp=Phases(forward, dx, overlapped(self.gpu, free, move)))
        back = all_reduce(self.cluster, self.tp, whole) * each
        if self.software.overlaps_backward_tp and not self.defers:
            back = overlapped(self.gpu, linear.dw, back)
        return Times(linear, tp=Phases(0.0, back))

    def _row(self, weight: tuple[int, ...]) -> Times:
        """A row-parallel linear layer: the result is reduced, dY is gathered for the backward."""
        linear = self._multiplied(partial(self._linear, weight))
        if self.grid.tp == 1:
            return Times(linear)
        whole = self.hidden_bytes * weight[0] / self.model.hidden_size
        if self.parallel.sequence_parallel:
            move = gather(self.cluster, self.tp, whole)
            return Times(
                linear,
                tp=Phases(self._beside(linear.forward, move), self._beside(linear.dx, move)),
            )
        return Times(linear, tp=Phases(all_reduce(self.cluster, self.tp, whole)))

    def _alone(self, weight: Weight) -> Times:
        """A linear layer with an input of its own."""
        shape = weight.local(self.grid.tp)
        if weight.split is None:
            return Times(self._linear(shape, self._own))
        if weight.split == 1:
            return self._row(shape)
        return self._column(partial(self._linear, shape), shape[1] / self.model.hidden_size)

    def _multiplied(self, linear_on: Callable[[int], Phases]) -> Phases:
        """A linear layer on all tokens, whose forward and dX may be cut into the parts of each
        rank."""
        whole = linear_on(self.tokens)
        if not self.in_parts:
            return whole
        part = linear_on(self.tokens // self.grid.tp) * self.grid.tp
        return Phases(part.forward, part.dx, whole.dw)

    def _beside(self, work: float, move: float) -> float:
        """Exposed seconds of a collective that overlaps with the multiplication before or after
        it."""
        if self.in_parts:
            return overlapped(self.gpu, self._others(work), move)
        hidden = self.hidden_tp * move
        return move - hidden + overlapped(self.gpu, work, hidden)

    def _others(self, work: float) -> float:
        """Seconds of all parts of a multiplication except one: a gather's first part, or a sum's
        last, has no message to overlap with."""
        return work * (1 - 1 / self.grid.tp) if self.in_parts else 0.0

    @cached_property
    def _own(self) -> int:
        """Number of this rank's tokens with sequence parallelism."""
        return self.tokens // self.parts
