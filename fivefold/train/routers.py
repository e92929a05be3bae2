"""What the routers of a run decide in a step, collected from all ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.description.shape import all_layers, whole_model
from fivefold.layout import Layout
from fivefold.model.transformer import Stage, with_own_losses


class Routers:
    """The routers of this rank's stages.

    Args:
        layout: layout of the run.
        stages: this rank's stages.
        loss_scale: factor of the loss in its gradients, scalar; None: 1.

    Attributes:
        layers: every layer of the model that has experts.
    """

    def __init__(
        self, layout: Layout, stages: Mapping[int, Stage], loss_scale: Tensor | None
    ) -> None:
        model = layout.config.model
        self._model = model
        self.layers = [*filter(model.is_moe, all_layers(model, whole_model(model)))]
        self._experts = model.num_experts or 0
        self._routers = [moe.router for stage in stages.values() for moe in stage.mixtures]
        self._modules = [module for stage in stages.values() for module in with_own_losses(stage)]
        for module in self._modules:
            module.loss_scale = loss_scale
        self._copies = layout.grid.ranks_per_stage * layout.num_copies

    def begin(self, global_batch_size: int) -> None:
        """Begin a step of this many rows over all ranks, or repeat it, for indexers, too."""
        for module in self._modules:
            module.begin_step(global_batch_size)

    def sums(self, routing: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """This rank's part of [layers, E + 4] fp64, which add up over all ranks: tokens of each
        expert, rows dropped, auxiliary losses, lowest and highest bias."""
        total = torch.zeros(len(self.layers), self._experts + 4, dtype=torch.float64, device=device)
        for router in self._routers:
            for layer in self._model.layers_like(router.layer):
                row = total[self.layers.index(layer)]
                row[:-2] += routing[layer]
                if router.expert_bias is not None:
                    ends = torch.stack(router.expert_bias.aminmax())
                    row[-2:] += ends.double() / self._copies  # every rank of the stage has the same
        return total

    def update(self, sums: Tensor) -> None:
        """Move the routers' biases after a weight update, by the sums of all ranks."""
        for router in self._routers:
            like = map(self.layers.index, self._model.layers_like(router.layer))
            # Row by row: the host would wait for a list of them to reach the device.
            first, *others = (sums[row, : self._experts] for row in like)
            router.update_bias(sum(others, start=first))
