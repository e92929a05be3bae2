"""The bytes that a rank sends because of experts, in closed form, given the rows; torch-free."""

from collections.abc import Iterator, Mapping

from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.messages import Flow, wire_bytes
from fivefold.counts.routed import LayerRows, expected_rows, padded_rows
from fivefold.layout import Layout
from fivefold.model.description import layer_kind
from fivefold.pipeline.stages import StageSpec

NUMBER_BYTES = 8  # numbers of rows and of experts are int64


def expert_flows(
    layout: Layout, rank: int, rows: Mapping[int, LayerRows] | None = None
) -> Iterator[Flow]:
    """Tokens on their way to experts and back, and what routers tell each other.

    Args:
        layout: layout of the run.
        rank: rank that sends.
        rows: rows of each layer in the step; None: as expected if experts are chosen evenly.
    """
    flows = _ExpertFlows(layout)
    for spec in layout.stages_of(layout.grid.coordinates(rank)["pp"]).values():
        for layer, (forwards, returns) in _forwards(layout, spec).items():
            if layout.config.parallel.moe_token_dispatcher_type == "allgather":
                yield from flows.gathered(forwards, returns)
            else:
                evenly = expected_rows(layout, flows.tokens)
                of_layer = evenly if rows is None else rows[layer]
                of_layer = flows.padded or of_layer
                yield from flows.moved(of_layer, forwards, returns)
                yield from flows.joined(of_layer, forwards, returns)
            yield from flows.balance()


def _forwards(layout: Layout, spec: StageSpec) -> dict[int, tuple[int, int]]:
    """How often rows go to experts in the forwards of a stage's layers, and results come back.

    A repetition ends with the last tensor that it saves, which is before results come back, unless
    shared experts or the mask of a dropout follow, or another layer, or the norm that ends a
    further prediction.
    """
    model, memory = layout.config.model, layout.config.memory
    selected = memory.recompute_granularity == "selective" and "moe" in memory.recompute_modules
    found = {}
    for group, again in memory.recomputed_groups(len(spec.layers)):
        for place in group:
            goes_on = bool(model.shared_ffn_size)
            if again:
                goes_on |= place != group[-1] or bool(model.hidden_dropout)
            repeated = again or selected
            if layer_kind(model, spec.layers[place]).experts:
                found[spec.layers[place]] = 1 + repeated, 1 + (repeated and goes_on)
    for layer in range(model.num_layers, model.num_layers + spec.mtp):
        whole = memory.recompute_granularity == "full"
        returns = 1 + (whole or (selected and bool(model.shared_ffn_size)))
        if layer_kind(model, layer).experts:
            found[layer] = 1 + (whole or selected), returns
    return found


class _ExpertFlows:
    """The numbers that the formulas share.

    Attributes:
        calls: forwards of a layer in a step.
        tokens: tokens of this rank in all of them.
        padded: rows of a step where every expert gets as many as it has room for; None elsewhere.
    """

    def __init__(self, layout: Layout) -> None:
        config, self._grid = layout.config, layout.grid
        self._model, self._settings, parallel = config.model, config.experts, config.parallel
        training, self._kind = config.training, parallel.moe_token_dispatcher_type
        element = ELEMENT_BYTES[training.precision]
        router = {"fp64": 8, "fp32": 4, None: 0}[config.experts.moe_router_dtype]
        self._row = config.model.hidden_size * element
        self._wide = max(element, router, 4)  # of scores and weights
        self._experts = config.model.num_experts or 1
        self._rows_B = training.micro_batch_size
        microbatches = layout.num_microbatches // layout.num_copies
        self.calls = microbatches * parallel.num_sequence_slices
        parts = layout.grid.cp * (layout.grid.tp if parallel.sequence_parallel else 1)
        tokens = training.micro_batch_size * training.seq_length // parts
        self.tokens = microbatches * tokens
        self.padded = padded_rows(layout, tokens, microbatches)

    def moved(self, rows: LayerRows, forwards: int, returns: int) -> Iterator[Flow]:
        """Between the ranks of expert parallelism.

        A row goes out with the weights of its experts, and a result comes back; the backward sends
        the gradients of both. Of flex, which sends a token once to a rank, the numbers of the
        experts go with it. Before, the ranks tell each other the numbers of rows.
        """
        ranks, topk = self._grid.ep, self._model.moe_router_topk
        once = self._kind == "flex"
        weights = self._wide * (topk if once else 1)
        both_ways = (forwards + 1) * rows.sent + (returns + 1) * rows.got
        yield Flow("ep", "tokens to experts and back", both_ways * self._row)
        yield Flow("ep", "weights of rows", (forwards * rows.sent + rows.got) * weights)
        if once:
            yield Flow("ep", "numbers of experts", forwards * rows.sent * topk * NUMBER_BYTES)
        counts = (ranks - 1) * (1 if once else self._experts // ranks)
        if self.padded:
            return  # nobody asks for numbers
        yield Flow("ep", "numbers of rows", forwards * self.calls * counts * NUMBER_BYTES)

    def joined(self, rows: LayerRows, forwards: int, returns: int) -> Iterator[Flow]:
        """Between the ranks of an expert, which gather each other's rows and reduce results: a
        rank sends its rows to each of the others, and to each the results of theirs."""
        others = self._grid.etp - 1
        own = others * rows.computed
        both_ways = (forwards + 1) * own + (returns + 1) * rows.joined
        yield Flow("etp", "rows of a split expert", both_ways * self._row)
        yield Flow("etp", "weights of rows", (forwards * own + rows.joined) * self._wide)
        parts = 1 if self._kind == "flex" else self._grid.ep
        counts = others * parts * self._experts // self._grid.ep
        if self.padded:
            return
        yield Flow("etp", "numbers of rows", forwards * self.calls * counts * NUMBER_BYTES)

    def gathered(self, forwards: int, returns: int) -> Iterator[Flow]:
        """Every token with its choices to all ranks of the experts, and results summed."""
        grid, topk = self._grid, self._model.moe_router_topk
        sent = (grid.ep * grid.etp - 1) * self.tokens
        axis = "ep x etp" if grid.ep > 1 and grid.etp > 1 else "ep" if grid.ep > 1 else "etp"
        yield Flow(axis, "tokens to experts and back", (forwards + returns + 2) * sent * self._row)
        yield Flow(axis, "weights of rows", (forwards + 1) * sent * topk * self._wide)
        yield Flow(axis, "numbers of experts", forwards * sent * topk * NUMBER_BYTES)

    def balance(self) -> Iterator[Flow]:
        """How many tokens chose each expert, for losses that look at other ranks' tokens as well;
        the scores of them all for Sinkhorn's assignment. A repetition keeps what was decided."""
        sharing = self._grid.cp * self._grid.tp
        size = self._experts * self._wide
        for kind, _ in self._settings.aux_losses:
            rows = self._rows_B if kind == "seq_aux_loss" else 1
            ranks = self._grid.ranks_per_stage if kind == "global_aux_loss" else sharing
            summed = wire_bytes("all_reduce", rows * size, ranks)
            yield Flow("router", "tokens of each expert", self.calls * summed)
        if "sinkhorn" in self._settings.moe_router_load_balancing_type:
            yield Flow("router", "scores of experts", (sharing - 1) * self.tokens * size)
