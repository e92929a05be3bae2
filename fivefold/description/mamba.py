"""The operations of layers with Mamba-2, and their costs."""

from dataclasses import dataclass

from fivefold.config.model import ModelConfig
from fivefold.description.linear_attention import (
    AGAIN,
    CHUNK,
    GatedHeads,
    Recurrence,
    filled,
)
from fivefold.description.operations import ColumnLinear, Operation, RowLinear
from fivefold.description.running import Running
from fivefold.description.weights import Weight, column, row


@dataclass(frozen=True, kw_only=True)
class StateSpace(Recurrence):
    """The convolution over x, B and C, and the state space."""

    @property
    def flops(self) -> int:
        """Seven for each feature of each state."""
        return 7 * self.sizes.size * self.sizes.key

    @property
    def rates(self) -> int:
        """The step, by which a state both learns and forgets."""
        return 1

    def working(self, running: Running) -> float:
        """See `Recurrence.working`; numbers as in `DeltaRule.working`."""
        sizes, tp = self.sizes, running.tensor_parallel
        groups, heads = sizes.groups / tp, sizes.heads / tp
        of_keys, of_each, of_heads = groups * sizes.key, heads * sizes.key, heads * sizes.value
        walk = 5 * of_keys + 5 * of_each + 6 * of_heads + (5 * heads + 2 * groups) * CHUNK
        taps = sizes.taps * (2 * of_keys + of_heads) + 10 * of_keys + 6 * of_heads
        return max(running.element_bytes, 4) * max(filled(running) * walk, taps)


def mamba(model: ModelConfig, remade_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """Mamba-2 without the norm and the sum around it; `remade_by`: recomputed modules that make
    its input again."""
    h, sizes = model.hidden_size, model.states
    heads, size, mixed = sizes.heads, sizes.size, sizes.mixed
    projections = (
        *column("self_attn.in_proj_xbcz", h, mixed + size, False),
        *column("self_attn.in_proj_dt", h, heads, False),
    )
    of_heads = (
        Weight("self_attn.conv1d.weight", (mixed, 1, sizes.taps), split=0),
        Weight("self_attn.conv1d.bias", (mixed,), split=0),
        *(Weight(f"self_attn.{name}", (heads,), split=0) for name in ("A_log", "dt_bias", "D")),
    )
    return (
        ColumnLinear(
            "mamba_in",
            projections,
            AGAIN,
            inputs=h,
            outputs=mixed + size + heads,
            remade_by=remade_by,
        ),
        StateSpace("state_space", of_heads, AGAIN, model=model),
        GatedHeads(
            "gated_norm", (Weight("self_attn.norm.weight", (size,), split=0),), AGAIN, features=size
        ),
        RowLinear(
            "attn_proj",
            row("self_attn.out_proj", size, h, False),
            inputs=size,
            outputs=h,
            remade_by=AGAIN,
        ),
    )
