"""Predicts the times of a layer's operations on one rank.

Times are for one microbatch and split by cause. Multiplications follow from the description of the
layer, transfers from the process groups of `mesh.grid`.
"""

from copy import copy
from functools import partial

from fivefold.description.core_attention import CoreAttention
from fivefold.description.experts import Dispatch, ExpertsIn, ExpertsOut, RouterLinear
from fivefold.description.latent import LatentDown, LatentLinear, LatentUp
from fivefold.description.linear_attention import GatedHeads, Recurrence
from fivefold.description.lora import Adapters, Rescaled
from fivefold.description.operations import (
    Activation,
    ColumnLinear,
    Norm,
    Operation,
    Residual,
    RowLinear,
)
from fivefold.description.prediction import MTPInput
from fivefold.description.softmax_attention import Clamp
from fivefold.description.sparse import Indexing, SparseAttention
from fivefold.layout import Layout
from fivefold.model.fusion_rules import joins_norm
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Software
from fivefold.predict.times.communication import all_reduce, all_to_all, gather, span, token_copies
from fivefold.predict.times.compute import (
    Phases,
    activation_traffic,
    elementwise,
    score_matrices,
)
from fivefold.predict.times.context import configured_ways
from fivefold.predict.times.linears import ELEMENT, LinearTimes
from fivefold.predict.times.sparse import chosen_tokens, indexing
from fivefold.predict.times.stage import Times
from fivefold.predict.times.states import states

UNFUSED_TRAFFIC = 2.0  # bytes moved by unfused elementwise kernels, relative to a fused one
UNFUSED_NORM = 4.0  # of a norm in fp32: cast, square, mean, scale, cast back, weight
UNFUSED_ROTATION = 4.0  # cast, complex product, cast back


class OperationTimes(LinearTimes):
    """The times of a layout's operations on a cluster.

    One class because the methods, one for each kind of operation, share the same constants of
    layout, cluster and software; nothing in it changes after construction.
    """

    def __init__(self, layout: Layout, cluster: Cluster, software: Software) -> None:
        super().__init__(layout, cluster, software)
        grid = layout.grid
        self.ep = span(cluster, grid.ep, grid.etp)
        self.etp = span(cluster, grid.etp, 1)
        self.share = self.config.experts.fixed_share(self.model, grid.ep)
        self.joins_norm = joins_norm(self.config)

    def operation(self, op: Operation) -> Times:
        """The times of one operation of a layer; frozen weights have no dW."""
        of = self
        if op.wide:
            of = copy(self)
            of.precision = self.training.precision
        times = of._operation(op)
        return times.without_dw() if op.frozen else times

    def _operation(self, op: Operation) -> Times:
        weights = [weight.local(self.grid.tp) for weight in op.multiplied]
        match op:
            case Norm():  # norms of single heads are fused with the rotation
                return (
                    Times()
                    if op.heads and not op.together
                    else self._norm(op.features * op.together)
                )
            case Residual():
                made = self._residual(joins=op.name == "attn_residual")
                return made + self._scaled(op.scaled)
            case ColumnLinear():
                rows = [rows for rows, _ in weights]
                each = len(rows) if self.software.gathers_each else 1
                joined = partial(self._joined, rows, inputs=op.inputs)
                return self._column(joined, op.inputs / self.model.hidden_size, each)
            case LatentDown() | LatentLinear():
                own = self.tokens // self.parts
                return Times(sum((self._linear(weight, own) for weight in weights), Phases()))
            case LatentUp():
                return self._latent_up(op, weights)
            case Indexing():
                own = self.tokens // self.parts
                products = sum((self._linear(weight, own) for weight in weights), Phases())
                return indexing(op, self.config, self.cluster, self.tp, products)
            case CoreAttention():
                return self._core_attention(op)
            case Recurrence():
                return states(op, self.config, self.cluster, self.software)
            case GatedHeads():
                size = self.tokens * ELEMENT * op.features / self.grid.tp
                return self._elementwise(3 * size, 5 * size)
            case MTPInput():
                (weight,) = weights
                return self._norm() * 3 + self._projection(weight)
            case RowLinear():
                (weight,) = weights
                return self._row(weight)
            case Adapters():  # A or B is whole, on this rank's tokens; the other is split
                return sum((self._alone(weight) for weight in op.multiplied), Times())
            case Rescaled():
                return self._rescaled(op)
            case Clamp():
                size = self.tokens * ELEMENT * (op.queries + op.keys) / self.grid.tp
                return self._elementwise(2.5 * size, 2.5 * size, 2.5)
            case Activation():
                if not op.copies:
                    return self._activation(self.tokens * (op.features // self.grid.tp))
                reached = self._rows(op.copies) * self._imbalance
                return self._activation(reached * (op.features // self.grid.etp))
            case RouterLinear():
                moved = self._own * (op.experts * 12 + op.inputs * ELEMENT)
                return self._elementwise(moved, moved)
            case Dispatch():
                return self._dispatched(op.copies)
            case ExpertsIn():
                return Times(self._grouped(op.outputs // self.grid.etp, op.inputs, op.copies))
            case ExpertsOut():
                return Times(self._grouped(op.outputs, op.inputs // self.grid.etp, op.copies))
        return Times()

    def _latent_up(self, op: LatentUp, weights: list[tuple[int, ...]]) -> Times:
        """Projections to heads, column-parallel layers of their latents: of queries, then of keys
        and values. Where context-parallel ranks gather latents, keys and values are made of all
        tokens, and once more in the backward; where it reads those of chosen tokens, within it."""
        *queries, keys = weights
        hidden = self.model.hidden_size
        times = Times()
        for weight in queries:
            times += self._column(partial(self._linear, weight), weight[1] / hidden)
        read = (keys[1] + op.shared) / hidden
        layers = self.model.softmax_layers
        kept = sum(map(self.config.keeps_latents, layers)) / max(len(layers), 1)
        projected = sum(map(self.config.projects_latents, layers)) / max(len(layers), 1)
        times += self._column(partial(self._linear, keys), read) * (1 - kept)
        every = self._linear(keys, self.tokens * self.grid.cp)
        moved = gather(self.cluster, self.tp, read * self.hidden_bytes) if self.parts > 1 else 0.0
        again = Phases(0.0, every.forward)
        times += Times(every, recompute=again) * projected
        return times + Times(tp=Phases(moved, moved)) * kept

    def _rescaled(self, op: Rescaled) -> Times:
        """DoRA's rescaling: reads the rows of weights, multiplies them by A, and scales the
        result."""
        times = Times()
        for weight in op.measured:
            rows, columns = weight.local(self.grid.tp)
            tokens = self.tokens if weight.split == 0 else self._own
            made, read = tokens * rows * ELEMENT, rows * columns * ELEMENT
            times += self._elementwise(2 * made + 2 * read, 4 * made)
            if op.apart:
                times += self._alone(weight).without_dw()
            if weight.split == 1 and self.grid.tp > 1:
                times += Times(tp=Phases(all_reduce(self.cluster, self.tp, 2 * rows * ELEMENT)))
        return times

    def _elementwise(
        self, forward: float, backward: float, unfused: float = UNFUSED_TRAFFIC
    ) -> Times:
        """Elementwise kernels that read and write this many bytes, or `unfused` times as many
        without fusion."""
        times = 1.0 if self.software.fused else unfused
        kernels = 1 if self.software.fused else 4
        gpu = self.gpu
        return Times(
            Phases(
                elementwise(gpu, forward * times, kernels),
                elementwise(gpu, backward * times, kernels),
            )
        )

    def _norm(self, together: int = 0) -> Times:
        """A norm of the residual stream, or of so many features of all heads `together`, of which
        ranks sum numbers of tokens."""
        size, squares, tp = self.hidden_bytes / self.parts, 0.0, self.grid.tp
        if together:
            size = self.tokens * ELEMENT * together / tp
            squares = all_reduce(self.cluster, self.tp, 4 * self.tokens * ELEMENT) * (tp > 1)
        rms = self.model.normalization == "RMSNorm"  # a LayerNorm is one kernel
        norm = self._elementwise(2 * size, 3 * size, UNFUSED_NORM if rms else UNFUSED_TRAFFIC)
        # One kernel widens the norm's input, another narrows the gradient that it writes.
        casts = (4, 5) if self.software.casts_norms else ()
        widened = Phases(*(elementwise(self.gpu, count * size, 1) for count in casts))
        return norm + Times(widened, tp=Phases(squares, squares))

    def _residual(self, *, joins: bool) -> Times:
        """The residual sum with the bias and dropout before it, forward and backward.

        With `joins` a norm follows, which the same kernel may make: it then reads no sum, and adds
        the gradient beside it to its own. A factor takes a pass of its own in the backward only.
        """
        size = self.hidden_bytes / self.parts
        scaled = 2 * size if self.model.residual_multiplier != 1.0 else 0.0
        if joins and self.joins_norm:
            return self._elementwise(2 * size, size + scaled)
        mask = size / 2 if self.model.hidden_dropout else 0.0
        return self._elementwise(3 * size + mask, 5 * size + mask if mask else 3 * size + scaled)

    def _scaled(self, scaled: bool) -> Times:
        """A pass over the residual stream, and over its gradient, if a factor scales it."""
        moved = 2 * self.hidden_bytes / self.parts
        return self._elementwise(moved, moved) if scaled else Times()

    def _activation(self, elements: float) -> Times:
        forward, backward, unfused = activation_traffic(self.model)
        size = elements * ELEMENT
        return self._elementwise(forward * size, backward * size, unfused or UNFUSED_TRAFFIC)

    def _core_attention(self, op: CoreAttention) -> Times:
        """RoPE of queries and keys, norms after it, and attention."""
        model, tp, length = op.model, self.grid.tp, self.training.seq_length
        mixed = self.tokens * ELEMENT * (model.q_size + model.k_size) / tp
        more = UNFUSED_NORM * model.qk_l2_norm  # no GPU kernel does it in one pass
        sizes = (2 + 2 * more) * mixed, (2 + 3 * more) * mixed
        rotary = self._elementwise(*sizes, UNFUSED_ROTATION) * model.rotated_share
        ways = configured_ways(self.config, self.cluster)
        if isinstance(op, SparseAttention):
            chosen = rotary + chosen_tokens(op, self.config, self.cluster, self.tp)
            return sum((Times(cp=way.exposed) * share for way, share in ways), chosen)
        if model.attention_dropout and self.software.attention == "scores":
            batch = self.tokens // length * (model.num_attention_heads // tp)
            dims, precision = (model.query_dim, model.value_dim), self.training.precision
            return rotary + Times(score_matrices(self.gpu, batch, length, dims, precision))
        for way, share in ways:
            rotary += Times(way.attention, cp=way.exposed) * share
        return rotary

    @property
    def _imbalance(self) -> float:
        """Rows of the busiest rank's experts, zeros included, over their even share."""
        return self.software.imbalance if self.share is None else self.share

    def _rows(self, copies: int) -> int:
        """Rows that reach the experts of a rank if all experts are used evenly."""
        return self._own * copies * self.grid.etp

    def _grouped(self, outputs: int, inputs: int, copies: int) -> Phases:
        """A linear layer [out, in] in each expert of a rank, on the rows that reach the expert."""
        return self._linear((outputs, inputs), *self.rows_of_one(copies))

    def rows_of_one(self, copies: int) -> tuple[int, int]:
        """Rows of a microbatch for one expert of the busiest rank, and the experts of that rank."""
        local = (self.model.num_experts or 0) // self.grid.ep
        return max(1, round(self._rows(copies) * self._imbalance / local)), local

    def _dispatched(self, copies: int) -> Times:
        """The permutation of rows, and their all-to-alls to the experts and back."""
        size = 4 * self._rows(copies) * self.model.expert_features * ELEMENT
        moved = 2 * self._dispatch(self._own)
        return self._elementwise(size, size) + Times(ep=Phases(moved, moved))

    def _dispatch(self, own: int) -> float:
        """Seconds for a rank's tokens to reach their experts, or to return from them."""
        model, grid, row = self.model, self.grid, self.model.expert_features * ELEMENT
        tensor = gather(self.cluster, self.etp, own * model.moe_router_topk * row * grid.etp)
        if grid.ep == 1:
            return tensor
        kind = self.parallel.moe_token_dispatcher_type
        copies, remote = token_copies(model, self.ep, kind, self.share)
        sent = all_to_all(self.cluster, self.ep, own * copies * row, own * remote * row)
        return sent * (self.software.imbalance if self.share is None else 1.0) + tensor
