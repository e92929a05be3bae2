"""Bytes that a rank sends for experts, in closed form, given the number of rows; torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.messages import Flow, wire_bytes
from fivefold.counts.recompute import recomputed_layers
from fivefold.counts.routed import StepRows
from fivefold.description.expert_rows import LayerRows, expected_rows, padded_rows
from fivefold.description.kinds import layer_kind
from fivefold.description.layers import describe
from fivefold.description.running import Running
from fivefold.layout import Layout

NUMBER_BYTES = 8  # counts of rows and indices of experts are int64


def expert_flows(layout: Layout, rank: int, rows: StepRows | None) -> Iterator[Flow]:
    """Communication of expert dispatch and combine, and of routers.

    Args:
        layout: layout of the run.
        rank: rank that sends.
        rows: rows of each layer in the step; None: expected rows with evenly used experts.
    """
    flows = _ExpertFlows(layout)
    recomputed = layout.recomputed()
    for stage in layout.stages_of(layout.grid.coordinates(rank)["pp"]):
        again = recomputed[stage]
        for layer, (forwards, returns) in _forwards(layout, stage).items():
            yield from flows.travelled(
                _Trips(flows.microbatches, forwards, returns, 1),
                None if rows is None else rows.every[layer],
            )
            if again:  # one more forward of the whole stage, without omissions
                yield from flows.travelled(
                    _Trips(again, 1, 1, 0), None if rows is None else rows.again[layer]
                )
            yield from flows.balance()


@dataclass(frozen=True)
class _Trips:
    """How often one layer exchanges the rows of some microbatches.

    Attributes:
        microbatches: number of microbatches.
        forwards: number of dispatches of rows per microbatch.
        returns: number of combines of results per microbatch.
        backwards: number of backwards per microbatch, each of which sends gradients both ways.
    """

    microbatches: int
    forwards: int
    returns: int
    backwards: int

    @property
    def dispatches(self) -> int:
        """Number of dispatches of rows, or of their gradients, per microbatch."""
        return self.forwards + self.backwards

    @property
    def combines(self) -> int:
        """Number of returns of results, or of their gradients, per microbatch."""
        return self.returns + self.backwards


def _forwards(layout: Layout, stage: int) -> dict[int, tuple[int, int]]:
    """Layer -> how often a step's forwards dispatch rows to experts, and combine their results.

    Recomputation stops at the last tensor that was saved, which precedes the combine unless a
    projection out of latents, shared experts, a dropout mask, a norm or another layer follow.
    """
    model, found = layout.config.model, {}
    for layer, recompute in recomputed_layers(layout, stage):
        kind = layer_kind(model, layer)
        repeated = recompute.whole or "moe" in recompute.modules
        goes_on = bool(model.shared_ffn_size or model.moe_latent_size)
        if recompute.whole:
            goes_on |= not recompute.ends_group or describe(model, kind).keeps_end
        if kind.experts:
            found[layer] = 1 + repeated, 1 + (repeated and goes_on)
    return found


class _ExpertFlows:
    """Numbers that the formulas of one rank share.

    Attributes:
        microbatches: number of microbatches of a rank per step.
    """

    def __init__(self, layout: Layout) -> None:
        config, self._grid = layout.config, layout.grid
        self._model, self._settings, self._parallel = config.model, config.experts, config.parallel
        training, self._kind = config.training, self._parallel.moe_token_dispatcher_type
        element = ELEMENT_BYTES[training.precision]
        self._row = config.model.expert_features * element
        self._wide = Running.of(config).score_bytes
        self._experts = config.model.num_experts or 1
        self._rows_B = training.micro_batch_size
        self.microbatches = layout.num_microbatches // layout.num_copies
        self._slices = self._parallel.num_sequence_slices
        self._tokens = config.rank_tokens // self._parallel.token_parts
        split = {"ep": layout.grid.ep, "etp": layout.grid.etp}
        self._padded = padded_rows(
            self._kind, self._settings, self._model, tokens=self._tokens, **split
        )
        self._expected = expected_rows(self._kind, self._model, **split).times(self._tokens)

    def travelled(self, trips: _Trips, rows: LayerRows | None) -> Iterator[Flow]:
        """Communication of one layer: rows, their weights, and numbers of rows.

        Args:
            trips: number of exchanges.
            rows: rows of all these microbatches; None: expected rows with evenly used experts.
        """
        if self._kind == "allgather":
            yield from self._gathered(trips)
            return
        if rows is None or self._padded is not None:
            rows = (self._padded or self._expected).times(trips.microbatches)
        yield from self._moved(rows, trips)
        yield from self._joined(rows, trips)

    def _moved(self, rows: LayerRows, trips: _Trips) -> Iterator[Flow]:
        """All-to-all between expert-parallel ranks.

        A row is dispatched with the weights of its experts, and a result returns; the backward
        sends the gradients of both. With flex, which sends a token once per rank, expert indices
        are sent as well. Before that, the ranks exchange numbers of rows.
        """
        ranks, topk = self._grid.ep, self._model.moe_router_topk
        once = self._kind == "flex"
        weights = self._wide * (topk if once else 1)
        both_ways = trips.dispatches * rows.sent + trips.combines * rows.got
        yield Flow("ep", "tokens to experts and back", both_ways * self._row)
        scores = trips.forwards * rows.sent + self._weighed(trips) * rows.got
        yield Flow("ep", "weights of rows", scores * weights)
        if once:
            numbers = trips.forwards * rows.sent * topk
            yield Flow("ep", "numbers of experts", numbers * NUMBER_BYTES)
        counts = (ranks - 1) * (1 if once else self._experts // ranks)
        if not (self._padded and once):
            yield from self._row_counts("ep", counts, trips)

    def _joined(self, rows: LayerRows, trips: _Trips) -> Iterator[Flow]:
        """Communication between the ranks that split each expert.

        They gather each other's rows and reduce the results: a rank sends its rows to each of the
        others, and to each the results of theirs.
        """
        others = self._grid.etp - 1
        own = others * rows.computed
        both_ways = trips.dispatches * own + trips.combines * rows.joined
        yield Flow("etp", "rows of a split expert", both_ways * self._row)
        scores = trips.forwards * own + self._weighed(trips) * rows.joined
        yield Flow("etp", "weights of rows", scores * self._wide)
        parts = 1 if self._kind == "flex" else self._grid.ep
        yield from self._row_counts("etp", others * parts * self._experts // self._grid.ep, trips)

    def _weighed(self, trips: _Trips) -> int:
        """Number of exchanges of weights' gradients per microbatch: none if rows are multiplied by
        weights before dispatch."""
        return 0 if self._model.moe_apply_probs_on_input else trips.backwards

    def _row_counts(self, axis: str, counts: int, trips: _Trips) -> Iterator[Flow]:
        if not self._settings.moe_pad_expert_input_to_capacity:  # else known
            calls = trips.forwards * trips.microbatches * self._slices
            yield Flow(axis, "numbers of rows", calls * counts * NUMBER_BYTES)

    def _gathered(self, trips: _Trips) -> Iterator[Flow]:
        """allgather: every token with its choices to all ranks of the experts; results summed."""
        grid, topk = self._grid, self._model.moe_router_topk
        sent = (grid.ep * grid.etp - 1) * trips.microbatches * self._tokens
        axis = "ep x etp" if grid.ep > 1 and grid.etp > 1 else "ep" if grid.ep > 1 else "etp"
        both_ways = (trips.dispatches + trips.combines) * sent
        yield Flow(axis, "tokens to experts and back", both_ways * self._row)
        scores = (trips.forwards + self._weighed(trips)) * sent
        yield Flow(axis, "weights of rows", scores * topk * self._wide)
        yield Flow(axis, "numbers of experts", trips.forwards * sent * topk * NUMBER_BYTES)

    def balance(self) -> Iterator[Flow]:
        """Tokens per expert for losses over several ranks, and scores for Sinkhorn's assignment.

        Recomputation reuses the router's decisions.
        """
        sharing = self._grid.cp * self._grid.tp
        size = self._experts * self._wide
        for kind, _ in self._settings.aux_losses:
            rows = self._rows_B if kind == "seq_aux_loss" else 1
            ranks = self._grid.ranks_per_stage if kind == "global_aux_loss" else sharing
            summed = wire_bytes("all_reduce", rows * size, ranks)
            calls = self.microbatches * self._slices
            yield Flow("router", "tokens of each expert", calls * summed)
        forced = self._settings.moe_router_force_load_balancing  # and nothing is assigned
        if "sinkhorn" in self._settings.moe_router_load_balancing_type and not forced:
            tokens = self.microbatches * self._tokens
            yield Flow("router", "scores of experts", (sharing - 1) * tokens * size)
