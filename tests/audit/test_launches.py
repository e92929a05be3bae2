"""Operations that are counted, of everything and of each layer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.audit.launches import Launches, LayerLaunches
from fivefold.audit.report import PlannerEstimate, audit
from fivefold.check import check
from fivefold.config.sources import read_config
from fivefold.report.audited import layer_operations
from tests.audit.test_audit import records_of


class Layer(nn.Module):
    """Three operations forward, and two views; six backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.view(2, 8).sin().cos().view(16)


def test_views_and_mere_memory_are_no_launches() -> None:
    x = torch.ones(4, 4)
    with Launches() as seen:
        torch.empty_like(x)
        x.view(16)[2:].detach()
        x.sum().item()
        torch.promote_types(x.dtype, torch.float64)
    assert seen.count == 1


@pytest.mark.parametrize("again", [False, True])
def test_every_layer_counts_its_own_operations(again: bool) -> None:
    layers = [Layer() for _ in range(3)]
    x, grad = torch.randn(16, requires_grad=True), torch.ones(16)
    with LayerLaunches(layers) as seen:
        for _ in range(2):
            y = x * 1.0
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
            y.backward(grad)
    # cos: sin, neg, mul; sin: cos, mul; and the sum of both ways of the gradient.
    forward, backward = 3, 6
    if again:  # up to the last saved tensor
        backward += 1
    assert seen.of_a_layer == (forward, backward)
    assert seen.count == 2 * (3 * (forward + backward) + 2) + 1  # x * 1, twice, and a sum in x.grad


def test_without_a_backward_nothing_is_told_of_layers() -> None:
    layer, x = Layer(), torch.ones(16)
    with LayerLaunches([layer]) as seen, torch.no_grad():
        layer(x)
    assert seen.count == 3 and seen.of_a_layer is None


def test_a_report_tells_what_the_planner_takes_and_what_was_counted(tmp_path: Path) -> None:
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = read_config("debug", **settings, num_layers=2, global_batch_size=4)
    layout = check(config, 2)
    records = records_of(layout, 1, tmp_path)
    report = audit("", layout, records, None, None, layer_operations(layout))
    told = {finding.name: finding for finding in report.findings}
    forward, backward = (told[f"launches of a layer's {way}"] for way in ("forward", "backward"))
    assert (forward.predicted, backward.predicted) == (25, 50)
    assert "for a GPU" in forward.note and not backward.note
    assert forward.tolerance is None and forward.measured is not None
    total = told["launches of the step"].measured
    assert not told["launches of the step"].note
    assert total is not None and backward.measured is not None
    microbatches = config.training.global_batch_size // config.training.micro_batch_size
    layers = config.model.num_layers * microbatches
    assert layers * (forward.measured + backward.measured) < total
    # So slow a host launches for half of the step.
    slow = PlannerEstimate(2.0, (1.0, 3.0), [0.0], host_operation=1.0 / total)
    report = audit("", layout, records, None, slow)
    (note,) = (f.note for f in report.findings if f.name == "launches of the step")
    assert note.endswith("launching takes the host 1.0 s, 50% of the predicted step")
    told = {finding.name: finding for finding in report.findings}
    assert told["waits of the host"].measured == 1
    assert told["waits of the host"].note.startswith("1 at train/step_result.py:")
