"""The operations of latent attention before its scores, and what each costs; torch-free."""

from dataclasses import dataclass

from fivefold.model.operations import Kept, Operation
from fivefold.model.running import Running


@dataclass(frozen=True, kw_only=True)
class LatentDown(Operation):
    """Linear layers into the latents of queries, and of keys and values: whole on every rank.

    Attributes:
        inputs: features of a token.
        norms: normalisations of the latents.
    """

    inputs: int
    norms: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """Its input, as the multiplication reads it."""
        size = running.input_bytes * self.inputs / running.token_parts
        return (Kept(self.name, (size,), ("layernorm",)),)

    def deferred(self, running: Running) -> float:
        """Its input; gradients of latents are small beside those of heads."""
        return running.input_bytes * self.inputs / running.token_parts


@dataclass(frozen=True, kw_only=True)
class LatentUp(Operation):
    """Linear layers from latents to the heads of a rank.

    Attributes:
        latents: features of all latents together.
        uncompressed: features of the hidden state, where queries are made of it; else 0.
        shared: rotary features of the key that all heads share.
        outputs: features of queries, keys and values together.
    """

    latents: int
    uncompressed: int
    shared: int
    outputs: int

    def kept(self, running: Running) -> tuple[Kept, ...]:
        """The latents before and after their norms; the shared key to make keys again of."""
        before = running.element_bytes * self.latents / running.token_parts
        after = running.input_bytes * self.latents / running.token_parts
        key = running.element_bytes * self.shared / running.token_parts
        shared = Kept("shared_key", (key if "mla_up_proj" in running.remade else 0.0,))
        return Kept("latents", (before,)), Kept("mla_up_proj", (after,)), shared

    def deferred(self, running: Running) -> float:
        """Gradients of queries, keys and values."""
        return running.element_bytes * self.outputs / running.tensor_parallel

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """As of column-parallel layers of the latents; the shared key is not gathered again."""
        inputs = self.latents + self.uncompressed
        if sequence_parallel:
            return inputs + self.shared, 2 * inputs + self.shared
        return 0, 2 * (inputs + self.shared)
