"""The operations of layers with experts, and what each costs; torch-free."""

from dataclasses import dataclass

from fivefold.model.operations import Kept, Operation, RowLinear
from fivefold.model.running import Running

ROUTING = 9  # bytes per token and expert: fp32 scores, fp32 probabilities, a bit map


@dataclass(frozen=True, kw_only=True)
class RouterLinear(Operation):
    """Scores of all experts for each token, and the choice among them.

    Attributes:
        inputs: features of a token.
        experts: number of experts.
    """

    inputs: int
    experts: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """The input, which shared experts use as well; scores, probabilities and the choice."""
        parts = running.token_parts
        return (
            Kept("moe_input", (running.element_bytes * self.inputs / parts,), ("layernorm",)),
            Kept("router", (ROUTING * self.experts / parts,), ("moe",)),
        )

    def deferred(self, running: Running) -> float:
        """The input of all that sees every token, and the gradient of the layer's output."""
        x = running.input_bytes * self.inputs / running.token_parts
        return x + running.element_bytes * self.inputs


@dataclass(frozen=True, kw_only=True)
class Dispatch(Operation):
    """Rows on their way to experts, and results on their way back.

    Attributes:
        copies: experts that each token is sent to.
    """

    copies: int


@dataclass(frozen=True, kw_only=True)
class ExpertsIn(Operation):
    """The first linear layers of experts, each on the rows that reach it.

    Attributes:
        inputs: features of a row.
        outputs: features of the results of one expert, gate included.
        copies: experts that each token is sent to.
    """

    inputs: int
    outputs: int
    copies: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """The rows that reach this rank's experts; each rank of an expert has all of them."""
        size = running.input_bytes * self.inputs * running.rows(self.copies)
        return (Kept(self.name, (size,), ("moe",)),)

    def deferred(self, running: Running) -> float:
        """Rows, and gradients of the results."""
        each = running.rows_of_one(self.copies)
        x = running.input_bytes * each * self.inputs * running.expert_tensor_parallel
        return x + running.element_bytes * self.outputs * each

    def working(self, running: Running) -> float:
        """Bytes per token of gradients that are there when its weight gradient is computed."""
        each = self.outputs / running.expert_tensor_parallel + self.inputs
        around = self.inputs / running.token_parts
        return running.element_bytes * (around + running.rows_of_one(self.copies) * each)


@dataclass(frozen=True, kw_only=True)
class ExpertsOut(Operation):
    """The last linear layers of experts, whose results return to their tokens.

    Attributes:
        inputs: inner features of one expert.
        outputs: features of a row.
        copies: experts that each token is sent to.
    """

    inputs: int
    outputs: int
    copies: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Its input, and the results of a token's experts, which are weighted and added up."""
        inner = self.inputs / running.expert_tensor_parallel
        results = running.element_bytes * self.outputs * running.copies(self.copies)
        remade = ("moe", "moe_act", "routed_experts")
        return (
            Kept(self.name, (running.input_bytes * inner * running.rows(self.copies),), remade),
            Kept("combine", (results,), ("moe",)),
        )

    def deferred(self, running: Running) -> float:
        """Input, and gradients of the results."""
        x = running.input_bytes * running.rows_of_one(self.copies) * self.inputs
        return x + running.element_bytes * self.outputs * running.rows_of_one(self.copies)


@dataclass(frozen=True, kw_only=True)
class SharedOut(RowLinear):
    """The last linear layer of the experts that see every token.

    Attributes:
        widths: tensors as wide as its input that the activation before it keeps.
        features: features of a token.
    """

    widths: int
    features: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """All that shared experts keep: a narrower copy of their input, and their activation."""
        element, narrow = running.element_bytes, running.input_bytes
        cast = narrow * self.features / running.token_parts if narrow < element else 0.0
        inner = (element * self.widths + narrow) * (self.inputs / running.tensor_parallel)
        return (Kept("shared_experts", (cast + inner,), ("moe", "shared_experts")),)

    def deferred(self, running: Running) -> float:
        """Its input; the gradient of its output is the layer's, which the router counts."""
        return running.input_bytes * self.inputs / running.tensor_parallel
