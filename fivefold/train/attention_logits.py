"""The largest attention logits of a step, and QK-clip (MuonClip: Kimi K2, Moonshot AI, 2025).

A logit is a scaled product of a query with a key that it sees, before the softmax. Kernels note the
largest of each head while they attend; the largest over all microbatches and ranks is what one
device would have seen, so that every rank scales its part of the same weights by the same factors.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.description.shape import all_layers, whole_model
from fivefold.layout import Layout
from fivefold.mesh.collectives import start_all_reduce
from fivefold.model.attention.grouped_query import AttentionBlock
from fivefold.model.transformer import Stage
from fivefold.optim.optimizer import Optimizer


class AttentionLogits:
    """The largest attention logits in the heads of this rank's stages; empty if no setting asks for
    them.

    Args:
        layout: layout of the run.
        stages: this rank's stages.
        device: where they compute.
    """

    def __init__(self, layout: Layout, stages: Mapping[int, Stage], device: torch.device) -> None:
        model, self._settings = layout.config.model, layout.config.optimizer
        every = all_layers(model, whole_model(model)) if self._settings.notes_logits else ()
        self._rows = {layer: row for row, layer in enumerate(filter(model.is_softmax, every))}
        self._blocks = [
            (name, module, self._rows[module.layer])
            for stage in stages.values()
            for name, module in stage.named_modules()
            if isinstance(module, AttentionBlock) and self._rows
        ]
        shape = len(self._rows), model.num_attention_heads
        self._found = torch.full(shape, -inf, dtype=torch.float64, device=device)
        heads = model.num_attention_heads // layout.grid.tp
        for _, block, row in self._blocks:
            own = slice(block.head_offset, block.head_offset + heads)
            block.scores = replace(block.scores, largest=self._found[row, own])

    def begin(self) -> None:
        """Begin a step, or repeat it."""
        self._found.fill_(-inf)

    def agreed(self, group: dist.ProcessGroup | None) -> Tensor:
        """The largest logit of each head over all ranks, [layers, heads] fp64; empty if not asked
        for."""
        if not self._rows:
            return self._found
        return start_all_reduce(self._found.clone(), group, dist.ReduceOp.MAX).wait()

    @torch.no_grad()
    def clip(self, found: Tensor, optimizer: Optimizer) -> None:
        """Scale the query and key weights of heads whose largest logit is above the threshold.

        The optimizer's own weights are scaled, and those with which the model computes follow.

        Args:
            found: as `agreed` gave them.
            optimizer: optimizer that holds the weights.
        """
        limit, alpha = self._settings.qk_clip_threshold, self._settings.qk_clip_alpha
        share_LN = torch.where(found > limit, limit / found, 1.0).cpu()
        weights, changed = optimizer.weights(), {}
        for place, block, row in self._blocks:
            if bool((share_LN[row] == 1).all()):
                continue
            for linear, factor_R in block.clipped(share_LN[row], alpha).items():
                name = f"{place}.{linear}.weight"
                changed[name] = piece = weights[name]
                own_R1 = factor_R[piece.slices[0], None]
                piece.local.mul_(own_R1.to(piece.local.device))
        optimizer.take(changed)
