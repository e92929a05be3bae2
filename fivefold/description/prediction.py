"""The operation at the start of a multi-token prediction layer, and its costs."""

from dataclasses import dataclass

from fivefold.description.operations import Kept, Operation
from fivefold.description.running import Running, gradient_bytes


@dataclass(frozen=True, kw_only=True)
class MTPInput(Operation):
    """The start of a multi-token prediction layer: three norms and a projection 2h -> h.

    Attributes:
        features: features of the hidden state.
    """

    features: int

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """The embedding, unless it is frozen, and the input of the last norm.

        The previous state, which the first norm reads, counts with the states predicted from.
        """
        size = self.features / running.token_parts
        return (Kept("mtp_norms", ((2 - self.frozen) * running.element_bytes * size,)),)

    def kept_inputs(self, running: Running) -> tuple[Kept, ...]:
        """The input of the projection."""
        size = self.features / running.token_parts
        scaled = (2.0 * self.features,) if running.narrows() else ()
        return (Kept("mtp_proj", (2 * running.input_bytes * size,), scaled=scaled),)

    def gathered_narrow(self, running: Running) -> float:
        """See `Operation.gathered_narrow`."""
        return 2 * self.features if running.narrows() else 0.0

    def deferred(self, running: Running) -> float:
        """The input of the projection, and the gradient of its output."""
        outputs = gradient_bytes(running) * self.features / running.tensor_parallel
        return 2 * running.input_bytes * self.features / running.token_parts + outputs

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """As for a column-parallel layer of two hidden states.

        Without sequence parallelism its outputs are gathered as well.
        """
        if sequence_parallel:
            return 2 * self.features, (2 if self.frozen else 4) * self.features
        return self.features, 4 * self.features
