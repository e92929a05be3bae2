"""The operations of mixture-of-experts layers and their costs."""

from dataclasses import dataclass, field, replace

from fivefold.config.model import ModelConfig
from fivefold.description.operations import Kept, Operation, RowLinear
from fivefold.description.running import Running, gradient_bytes, layer_rows

_INDEX = 8  # bytes of the index of an expert or a row: int64
_RERUN_BY = "moe", "a2a_overlap_post_attn"
"""Recomputed modules that run the router again."""


@dataclass(frozen=True, kw_only=True)
class RouterLinear(Operation):
    """Router: scores of all experts for each token, and the top-k choice.

    Attributes:
        inputs: features of a token.
        model: model with experts.
        read: whether shared experts read the same input.
        adapted: whether these have adapters, which keep it.
        recomputed_by: recomputed modules that recompute the input.
    """

    inputs: int
    model: ModelConfig = field(repr=False)
    read: bool
    adapted: bool = False
    recomputed_by: tuple[str, ...] = ()

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.model.num_experts or 1

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """A jittered or wider copy of the input."""
        wide = running.router_bytes * self.inputs / running.token_parts
        return (Kept("router_input", (wide if self._copied(running) else 0.0,), _RERUN_BY),)

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """The input, shared with shared experts and with the product by its tokens' weights;
        scores; the decision, reused by recomputation."""
        return (
            Kept("moe_input", (self._input(running),), self.recomputed_by),
            Kept("router_factors", self._factors(running), _RERUN_BY),
            Kept("router", (self._scores(running) + self._losses(running),), _RERUN_BY),
            Kept("decision", (self._decision(running),), stays=True),
        )

    def _input(self, running: Running) -> float:
        """Bytes of the input itself: for a router, shared experts, or to make these again; for the
        gradient of the weights that multiply it."""
        multiplied = self.model.moe_apply_probs_on_input
        shared = self.read and (self.adapted or "shared_experts" in running.recomputed)
        if not (multiplied or shared or self.keeps_inputs(running)):
            return 0.0
        read = self.read or multiplied or self.model.moe_latent_size is not None
        alone = not read and {*_RERUN_BY}.isdisjoint(running.recomputed)
        x = running.element_bytes * self.inputs / running.token_parts
        return 0.0 if alone and self._copied(running) else x

    def _copied(self, running: Running) -> bool:
        """Whether the router reads a copy of the input."""
        jitters = running.experts.moe_input_jitter_eps is not None
        return jitters or running.router_bytes != running.element_bytes

    def _factors(self, running: Running) -> tuple[float, float]:
        """Bytes of the factors of the input's gradient: jitter, and a wider weight."""
        wide, element = running.router_bytes, running.element_bytes
        jitters = running.experts.moe_input_jitter_eps is not None
        jitter = element * self.inputs / running.token_parts if jitters else 0.0
        weight = wide * self.inputs * self.experts if wide > element else 0.0
        return jitter, running.by_microbatch(weight)

    def _scores(self, running: Running) -> float:
        """Bytes of all scores or logits, of those that the chosen weights come from, of weights and
        the numbers of their experts that multiply them, and of weights in the type of the tokens
        that they multiply."""
        model, topk = self.model, self.model.moe_router_topk
        numbers: float = self.experts
        if model.moe_router_score_function == "sigmoid":
            numbers += topk + 1 if topk > 1 else 0
        elif model.weighs_chosen:
            numbers += topk
        if model.moe_branch_norms:  # of a softmax over the chosen the weights are kept already
            numbers += topk * (1 if model.weighs_chosen else 2)
        dropped = topk if running.experts.limits_rows else 0
        multiplied = running.element_bytes * topk * model.moe_apply_probs_on_input
        return (running.score_bytes * numbers + dropped + multiplied) / running.token_parts

    def _losses(self, running: Running) -> float:
        """Bytes for losses: scores, shares per sequence, and logits with their log-sum-exp."""
        model, settings = self.model, running.experts
        sigmoid = model.moe_router_score_function == "sigmoid"
        kinds = [kind for kind, _ in settings.aux_losses]
        numbers = 0
        if kinds:
            numbers += (1 + kinds.count("seq_aux_loss")) * self.experts + sigmoid
        if settings.moe_z_loss_coeff:
            numbers += 1 + (self.experts if sigmoid or model.moe_router_pre_softmax else 0)
        return running.score_bytes * numbers / running.token_parts

    def _decision(self, running: Running) -> float:
        """Bytes of the chosen experts' indices, of which had capacity, and of sums over tokens."""
        settings, topk = running.experts, self.model.moe_router_topk
        loads = sum(
            running.microbatch_rows if kind == "seq_aux_loss" else 1
            for kind, _ in settings.aux_losses
        )
        sums = _INDEX * (self.experts + 2) + running.score_bytes * loads * self.experts
        own = topk * (_INDEX + settings.limits_rows) / running.token_parts
        return own + running.by_microbatch(sums)

    def deferred(self, running: Running) -> float:
        """The input shared with shared experts, and the gradient of the layer's output."""
        x = running.input_bytes * self.inputs / running.token_parts
        return x + running.element_bytes * self.inputs


@dataclass(frozen=True, kw_only=True)
class Dispatch(Operation):
    """All-to-all dispatch of rows to experts, and combine of their results.

    Attributes:
        copies: experts per token.
        model: model with experts.
    """

    copies: int
    model: ModelConfig = field(repr=False)

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Indices of rows, kept even if recomputed; numbers of rows; dispatched rows' weights,
        where rows were not multiplied before."""
        rows = running.rows(self.copies) + spare_row(running)
        rows *= not self.model.moe_apply_probs_on_input
        return (
            Kept("row_places", (self._places(running),), stays=True),
            Kept("row_sizes", (self._elsewhere(running) + self._sizes(running),), ("moe",)),
            Kept("row_weights", (running.score_bytes * rows,), ("moe",), "moe_act"),
        )

    def _places(self, running: Running) -> float:
        """Bytes of the indices of rows.

        They index this rank's choices, or all gathered ones, and sort the rows received from
        several ranks by expert.
        """
        own = self.copies / running.token_parts
        if running.expert_ranks > 1 and running.dispatcher == "allgather":
            return _INDEX * running.expert_ranks * own
        if running.expert_ranks == 1 or running.dispatcher == "alltoall":
            again = running.rows(self.copies) if running.expert_ranks > 1 else 0.0
            return _INDEX * (own + again)
        rows = layer_rows(running, self.model)
        again = rows.reached if running.expert_tensor_parallel > 1 else 0.0
        arrived = self.copies * (rows.got + rows.stayed)
        return _INDEX * (rows.sent + rows.stayed + arrived + again)

    def _elsewhere(self, running: Running) -> float:
        """Bytes of the mask of a row's choices that are on other ranks, for the gradients of their
        weights; only with flex."""
        multiplied = self.model.moe_apply_probs_on_input
        if multiplied or running.expert_ranks == 1 or running.dispatcher != "flex":
            return 0.0
        rows = layer_rows(running, self.model)
        return self.copies * (rows.sent + rows.stayed)

    def _sizes(self, running: Running) -> float:
        """Rows of each expert, and of choices that are elsewhere or dropped."""
        here = (self.model.num_experts or 1) // running.expert_parallel
        return running.by_microbatch(_INDEX * (here + self._counts_others(running)))

    def _counts_others(self, running: Running) -> bool:
        """Whether rows are counted here, together with choices elsewhere or dropped."""
        travel = running.expert_ranks > 1 and running.dispatcher != "allgather"
        return not (travel or running.pads_rows or running.routed is None)


def spare_row(running: Running) -> float:
    """Rows per token for dropped choices: one per microbatch if padded rows are used in place."""
    as_they_are = running.expert_ranks == 1 or running.dispatcher == "allgather"
    return running.by_microbatch(float(running.pads_rows and as_they_are))


@dataclass(frozen=True, kw_only=True)
class ExpertsIn(Operation):
    """The first linear layers of the experts, each applied to the rows dispatched to it.

    Attributes:
        inputs: features of a row.
        outputs: output features of one expert, including the gate.
        copies: experts per token.
        features: features of the residual stream.
    """

    inputs: int
    outputs: int
    copies: int
    features: int

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """The rows dispatched to this rank's experts; each rank that splits an expert has all."""
        rows = running.rows(self.copies)
        size = running.input_size("routed_experts") * self.inputs * (rows + spare_row(running))
        kept = Kept(self.name, (size,), ("moe",))
        narrows = running.narrows("routed_experts")
        return (_scaled(self, kept, self.inputs, running) if narrows else kept,)

    def deferred(self, running: Running) -> float:
        """The rows, and gradients of the outputs."""
        own = self.outputs / running.expert_tensor_parallel
        each = running.input_bytes * self.inputs + gradient_bytes(running) * own
        return running.rows(self.copies) * each

    def working(self, running: Running) -> float:
        """Bytes per token of gradients alive while its weight gradient is computed."""
        around = running.element_bytes * self.features / running.token_parts
        return around + self.of_outputs(running) + self.of_rows(running)

    def of_outputs(self, running: Running) -> float:
        """Bytes per token of the gradients of its outputs."""
        inner = self.outputs / running.expert_tensor_parallel
        return running.element_bytes * running.rows(self.copies) * inner

    def of_rows(self, running: Running) -> float:
        """Bytes per token of the gradient of its rows."""
        return running.element_bytes * running.rows(self.copies) * self.inputs

    @property
    def has_several(self) -> bool:
        """Whether each expert has several such layers."""
        return sum(len(weight.shape) == 3 for weight in self.weights) > 1


@dataclass(frozen=True, kw_only=True)
class ExpertsOut(Operation):
    """The last linear layers of the experts, whose results are combined per token.

    Attributes:
        inputs: inner features of one expert.
        outputs: features of a row.
        copies: experts per token.
        weighs: whether the router's weight multiplies its results.
    """

    inputs: int
    outputs: int
    copies: int
    weighs: bool

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """Its input, already weighted."""
        inner, rows = self.inputs / running.expert_tensor_parallel, running.rows(self.copies)
        size = running.input_size("moe_act") * inner * rows
        kept = Kept(self.name, (size,), ("moe", "moe_act", "routed_experts"))
        return (_scaled(self, kept, inner, running) if running.narrows("moe_act") else kept,)

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """The bias per row, which other frameworks keep for the gradient of the row's weight."""
        biased = any(len(weight.shape) == 2 for weight in self.weights)
        kept = biased * self.weighs * running.others
        size = running.element_bytes * self.outputs * kept * running.rows(self.copies)
        return (Kept("expert_fc2_bias", (size,), ("moe", "routed_experts")),)

    def deferred(self, running: Running) -> float:
        """The input, and gradients of the outputs, of which each rank that splits an expert has
        all."""
        own = self.inputs / running.expert_tensor_parallel
        each = running.input_bytes * own + gradient_bytes(running) * self.outputs
        return running.rows(self.copies) * each


def _scaled(linear: ExpertsIn | ExpertsOut, kept: Kept, features: float, running: Running) -> Kept:
    """The same items, with a scale for each expert's rows."""
    groups = () if running.routed is None else running.routed.by_expert
    if not groups:
        experts = linear.weights[0].shape[0] // running.expert_parallel
        groups = (running.rows(linear.copies) * running.microbatch_tokens / experts,) * experts
    return replace(kept, scaled=(features,), groups=groups)


@dataclass(frozen=True, kw_only=True)
class SharedOut(RowLinear):
    """The last linear layer of the shared experts, which process every token.

    Attributes:
        widths: tensors of its input's width that the preceding activation keeps.
        features: features of a token.
        gated: whether a gate per token weights the result.
        shares_input: whether their input is the router's, too, which counts it.
    """

    widths: int
    features: int
    gated: bool
    shares_input: bool

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """The input of the last linear layer, and a narrower copy of that of the first, if it is
        shared."""
        narrow = running.input_bytes
        copies = self.shares_input and running.narrows("layernorm")
        cast = narrow * self.features / running.token_parts if copies else 0.0
        within = self.inputs / running.tensor_parallel
        scaled = (*([self.features] if copies else []), *([within] if running.narrows() else []))
        size = cast + narrow * within
        return (Kept(self.name, (size,), ("moe", "shared_experts"), scaled=scaled),)

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """What their activation reads, and the result with its gate, if there is one."""
        element = running.element_bytes
        inner = element * self.widths * self.inputs / running.tensor_parallel
        gate = element * (self.features + 1) / running.token_parts if self.gated else 0.0
        return (
            Kept("shared_act", (inner,), ("moe", "shared_experts")),
            Kept("shared_gate", (gate,), ("moe",)),
        )

    def deferred(self, running: Running) -> float:
        """Its input. The gradient of its output is the layer's, which `RouterLinear` counts."""
        return running.input_bytes * self.inputs / running.tensor_parallel
