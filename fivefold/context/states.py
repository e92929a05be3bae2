"""Context parallelism of layers with states: each rank computes whole documents for some heads.

A state runs through a document from its beginning to its end, so ranks exchange the tokens they
hold for the heads that they compute, whatever attention with a softmax does (`cp_comm_type`).
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fivefold.context.attention import HeadAssignment, ToHeads, ToTokens
from fivefold.model.linear_attention.state_layer import StateLayer, StateScope


@dataclass(frozen=True)
class StatesOfHeads:
    """The kernel for the tokens of all ranks, for this rank's share of the key heads or groups.

    One all-to-all of the inputs, and one of the results.

    Attributes:
        group: context-parallel group.
    """

    group: dist.ProcessGroup

    def __call__(
        self, mixed: Tensor, rates: Tensor, layer: StateLayer, within: StateScope
    ) -> Tensor:
        """See `StateKernel`."""
        part, heads = within.part, mixed.shape[2]
        assert part is not None, "whole rows need no context parallelism"
        assignment = HeadAssignment(self.group, part, heads, heads)
        features = mixed.shape[3], rates.shape[3]
        mixed, rates = ToHeads.apply(assignment, features, mixed.flatten(2), rates.flatten(2))
        learned = layer.learned(assignment.queries(self.group.rank()))
        out = layer.states(mixed, rates, learned, layer.group, within.documents)
        back: Tensor = ToTokens.apply(out.flatten(2), assignment)
        return back.unflatten(2, (heads, -1))
