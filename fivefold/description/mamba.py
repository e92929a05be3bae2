"""The operations of layers with Mamba-2, and their costs."""

from dataclasses import dataclass

from fivefold.config.model import ModelConfig
from fivefold.description.linear_attention import (
    CHUNK,
    RERUN_BY,
    GatedHeads,
    Recurrence,
    filled,
    projection_back,
    projections,
)
from fivefold.description.operations import Operation
from fivefold.description.running import Running
from fivefold.description.weights import Weight, column


@dataclass(frozen=True, kw_only=True)
class StateSpace(Recurrence):
    """The convolution over x, B and C, and the state space."""

    @property
    def flops(self) -> int:
        """Seven for each element of each state."""
        return 7 * self.sizes.size * self.sizes.key

    @property
    def rates(self) -> int:
        """The step, which sets how fast a state learns and decays."""
        return 1

    def working(self, running: Running) -> float:
        """See `Recurrence.working`.

        Numbers are tensors that are alive at once, of the size of all B of a group's heads, of
        states, of heads, and of all pairs of tokens of a chunk: where what states give, where what
        tokens ask them, and where pairs have their gradients; and before the walk, what the
        convolution keeps of each tap.
        """
        sizes, tp = self.sizes, running.tensor_parallel
        heads = sizes.heads / tp
        of_each, of_heads, pairs = heads * sizes.key, heads * sizes.value, heads * CHUNK
        states, mixed = of_each * sizes.value / CHUNK, sizes.mixed / tp
        shared = sizes.groups / tp * (2 * sizes.key + CHUNK)
        given = 3 * of_each + 3 * states + 7 * of_heads + 2 * pairs
        asked = 4 * of_each + 2 * states + 5 * of_heads + 2 * pairs
        paired = 6 * of_heads + 5 * pairs
        walk = filled(running) * (max(given, asked, paired) + shared)
        return max(running.element_bytes, 4) * max(walk, (sizes.taps + 5) * mixed)


def mamba(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """Mamba-2 without the norm and the sum around it; `recomputed_by`: recomputed modules that make
    its input again."""
    h, sizes = model.hidden_size, model.states
    heads, size, mixed = sizes.heads, sizes.size, sizes.mixed
    made = (
        *column("self_attn.in_proj_xbcz", h, mixed + size, False),
        *column("self_attn.in_proj_dt", h, heads, False),
    )
    of_heads = (
        Weight("self_attn.conv1d.weight", (mixed, 1, sizes.taps), split=0),
        Weight("self_attn.conv1d.bias", (mixed,), split=0),
        *(Weight(f"self_attn.{name}", (heads,), split=0) for name in ("A_log", "dt_bias", "D")),
    )
    return (
        projections("mamba_in", made, h, mixed + size + heads, recomputed_by),
        StateSpace("state_space", of_heads, RERUN_BY, model=model),
        GatedHeads(
            "gated_norm",
            (Weight("self_attn.norm.weight", (size,), split=0),),
            RERUN_BY,
            features=size,
        ),
        projection_back(size, h),
    )
