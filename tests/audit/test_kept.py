"""What of a forward counts as kept, without a whole model around it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.audit.kept import KeptActivations


class _Offloading(nn.Module):
    """A stage that keeps one tensor beside its input, and a copy of another in other memory."""

    z_sums = ()

    def forward(self, x_TH: Tensor, batch: Any) -> Tensor:
        self.kept = x_TH * 2, (x_TH * 3).to("meta")
        return x_TH + 1


def test_copies_in_the_memory_of_a_host_are_not_kept_on_the_device() -> None:
    stage, x_TH = _Offloading(), torch.ones(3, 5)
    with KeptActivations({0: stage}, 3, lambda: ()) as kept:
        stage(x_TH, SimpleNamespace(packing=None, tokens=[x_TH], order=()))
    assert kept.sizes == {0: 2 * x_TH.nbytes}
