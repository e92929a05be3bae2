"""The z-loss of a step, told apart."""

from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.train.engine import Engine
from fivefold.train.step_result import StepResult
from tests.audit.layouts import microbatches_of
from tests.pool import run
from tests.verify.cases import MODELS, config, flags

LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "stages, MTP, recomputed": (
        2,
        flags(pp=2, stages="Et|ttmL")
        | {"mtp_num_layers": 1, "recompute_in_flight_limit": 1, "micro_batch_size": 1},
    ),
    "tensor and sequence parallel, linear": (2, flags(tp=2, sequence=True) | LINEAR),
    "context and data parallel": (4, flags(dp=2) | {"context_parallel_size": 2}),
}


def _step(rank: int, world: int, settings: dict[str, Any], z: float) -> StepResult:
    layout = check(config(MODELS["llama"], world, **settings | {"z_loss_coeff": z}), world)
    return Engine(layout, rank, torch.device("cpu")).step(microbatches_of(layout, rank))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_part_of_the_loss_that_is_z_loss_is_told(name: str) -> None:
    world, settings = LAYOUTS[name]
    found, without = (run(world, _step, settings, z) for z in (0.02, 0.0))
    for ours, plain in zip(found, without, strict=True):
        assert ours.extra["z_loss"] == pytest.approx(ours.loss - plain.loss, rel=1e-11) != 0.0
        assert "z_loss" not in plain.extra
        assert ours.extra.keys() - plain.extra.keys() == {"z_loss"}
