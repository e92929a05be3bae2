"""What a framework does that no setting says: Fivefold's own habits, and those of others."""

from dataclasses import dataclass, replace
from typing import Literal

from fivefold.predict.cluster import Cluster


@dataclass(frozen=True)
class Software:
    """What a framework does, as far as Fivefold's settings do not say it.

    Attributes:
        fused: norms, residuals, activations and the loss are one kernel each; otherwise each
            elementwise operation reads and writes memory by itself.
        attention: the kernel: the best that there is, FlashAttention-2 or the first one, or none
            that is fused: the matrix of scores is held in memory where probabilities are dropped.
        overlaps_backward_tp: the backward of column-parallel layers gathers X again behind dX, and
            sums dX behind dW; otherwise X is kept whole, and the sum is exposed.
        eager_dx: the gradient of a stage's input leaves before that of its weights is computed;
            None: as the layout says (`Layout.defers_weights`).
        gradient_bytes: bytes of a gradient on the wire; None: as the settings say.
        reduces_once: with a pipeline, parameters are gathered and gradients reduced once a step,
            however they are sharded; Fivefold does so for each microbatch under ZeRO-2 and ZeRO-3.
        joins_linears: queries, keys and values are one multiplication, and a gated MLP's two
            projections another.
        keeps_every_second: selective recomputation keeps the results of attention and of every
            second multiplication, and runs everything else again (torchtitan's "op").
        by_tensor: each parameter is gathered, its gradient reduced and its optimizer run by itself;
            otherwise a layer's together.
        gathers_to_recompute: with sharded parameters, they are gathered for the forward, again to
            run it again, and again for the backward: four passes of parameters and gradients over
            the network (ZeRO-Infinity, Rajbhandari et al., 2021, section 4); otherwise what runs
            again is kept until the backward is done with it.
        gather_rate: bytes/s at which parameters are gathered and gradients reduced, however fast
            the links are; the forward's gathers run beside nothing. None: as the links allow.
        waits_for_hops: a stage computes nothing while a message travels to it.
        scatters_hops: where activations are whole on every tensor-parallel rank, each sends its
            share to the next pipeline rank's node, where they are gathered (Narayanan et al., 2021,
            section 4.1).
        imbalance: tokens of the busiest rank's experts, over their even share.
    """

    fused: bool = True
    attention: Literal["best", "flash2", "flash1", "scores"] = "best"
    overlaps_backward_tp: bool = True
    eager_dx: bool | None = None
    gradient_bytes: float | None = None
    reduces_once: bool = False
    joins_linears: bool = True
    keeps_every_second: bool = False
    by_tensor: bool = False
    gathers_to_recompute: bool = False
    gather_rate: float | None = None
    waits_for_hops: bool = False
    scatters_hops: bool = False
    imbalance: float = 1.0

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster as this software can use it: its attention may be slower than the best."""
        gpu = cluster.gpu
        share = {"flash1": gpu.flash1, "flash2": gpu.flash2}.get(self.attention, 1.0)
        if share == 1.0:
            return cluster
        slower = replace(
            gpu,
            attention_forward=gpu.attention_forward * share,
            attention_backward=gpu.attention_backward * share,
        )
        return replace(cluster, gpu=slower)
