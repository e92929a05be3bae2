"""What a framework does that no setting says: Fivefold's own habits, and those of others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """What a framework does, as far as Fivefold's settings do not say it.

    Attributes:
        fused: norms, residuals, activations and the loss are one kernel each; otherwise each
            elementwise operation reads and writes memory by itself.
        fused_attention: attention never holds the matrix of scores; dropping probabilities with
            a kernel that cannot needs it.
        overlaps_backward_tp: the backward of column-parallel layers gathers X again behind dX, and
            sums dX behind dW; otherwise X is kept whole, and the sum is exposed.
        eager_dx: the gradient of a stage's input leaves before that of its weights is computed;
            None: as the layout says (`Layout.defers_weights`).
        gradient_bytes: of a gradient on the wire; None: as the settings say.
        reduces_once: with a pipeline, parameters are gathered and gradients reduced once a step,
            however they are sharded; Fivefold does so for each microbatch under ZeRO-2 and ZeRO-3.
        by_tensor: each parameter is gathered and its gradient reduced by itself; otherwise a
            layer's together.
        imbalance: tokens of the busiest rank's experts, over their even share.
    """

    fused: bool = True
    fused_attention: bool = True
    overlaps_backward_tp: bool = True
    eager_dx: bool | None = None
    gradient_bytes: float | None = None
    reduces_once: bool = False
    by_tensor: bool = False
    imbalance: float = 1.0
