"""The loss scale of fp16: how it is found, and that it leaves no trace in what is computed."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fivefold.check import check
from fivefold.config.model import ModelConfig
from fivefold.config.training import LARGEST_LOSS_SCALE
from fivefold.optim.loss_scale import LossScaler, ScaleState
from fivefold.train import engine as engine_
from fivefold.train.engine import Engine
from tests.audit.layouts import microbatches_of
from tests.pool import run
from tests.verify.cases import LLAMA, MIXTURE, MODELS, config, flags, named, shared_groups

CPU = torch.device("cpu")


def scaler(**settings: Any) -> LossScaler:
    return LossScaler(config(LLAMA, 1, precision="fp16", **settings), CPU)


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 9), st.integers(-3, 40))
def test_it_changes_as_torchs_own(overflows: list[bool], window: int, first: int) -> None:
    """Which has neither a least scale nor patience."""
    found = scaler(
        initial_loss_scale=2.0**first,
        min_loss_scale=2.0**-64,
        loss_scale_window=window,
        hysteresis=1,
    )
    scale, good = torch.tensor(2.0**first), torch.tensor(0, dtype=torch.int32)
    for overflowed in overflows:
        torch._amp_update_scale_(scale, good, torch.tensor(float(overflowed)), 2.0, 0.5, window)
        scale.clamp_(1 / LARGEST_LOSS_SCALE, LARGEST_LOSS_SCALE)
        found.update(overflowed=overflowed)
        assert found.scale == float(scale) == float(found.factor)


def test_it_is_patient_between_doublings_and_has_a_least_value() -> None:
    """As in Megatron-LM, whose patience comes back with a doubling alone."""
    found = scaler(initial_loss_scale=16.0, min_loss_scale=3.0, loss_scale_window=2, hysteresis=3)
    seen = []
    for overflowed in (True, True, False, True, True, True, True, False, False, True, True, True):
        found.update(overflowed=overflowed)
        seen.append(found.scale)
    assert seen == [16, 16, 16, 8, 4, 3, 3, 3, 6, 6, 6, 3]


def test_a_constant_one_stays_and_other_types_have_none() -> None:
    constant, none = scaler(loss_scale=100.0), LossScaler(config(LLAMA, 1), CPU)
    for each in (constant, none):
        each.update(overflowed=True)
        each.take(ScaleState(2.0))
        assert each.state is None
    assert constant.scale == 100 == float(constant.factor)
    assert none.scale is none.factor is None


BALANCED: dict[str, Any] = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2, 0.3),
    "moe_z_loss_coeff": 0.05,
}
LAYOUTS: dict[str, tuple[int, ModelConfig, dict[str, Any]]] = {
    "one rank, tied": (1, MODELS["gpt"], {}),
    "stages, MTP, recomputed": (
        2,
        replace(LLAMA, mtp_num_layers=1),
        flags(pp=2, stages="Et|ttmL") | {"recompute_in_flight_limit": 1, "micro_batch_size": 1},
    ),
    "losses of routers, ZeRO-3": (
        2,
        MIXTURE,
        named(ep=2, strategy="optim_grads_params", **BALANCED),
    ),
    "losses of routers, tensor parallel, on the host": (
        2,
        MIXTURE,
        named(tp=2, optimizer_cpu_offload=True, **BALANCED),
    ),
    "slices": (
        2,
        LLAMA,
        flags(pp=2) | {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2},
    ),
}


@shared_groups()
def _gradients(
    rank: int, world: int, model: ModelConfig, settings: dict[str, Any], scale: float
) -> tuple[float, float, dict[str, Tensor]]:
    """In fp64, where a power of two is a factor of every number, to the bit."""
    layout = check(config(model, world, **settings), world)

    class Scaler(LossScaler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.factor = torch.tensor(scale)

    with patch.object(engine_, "LossScaler", Scaler):
        engine = Engine(layout, rank, CPU)
    found = engine.gradients(microbatches_of(layout, rank)).read()
    grads = {name: engine.optimizer.gradient(name).clone() for name in engine.trained}
    return found.loss, found.grad_norm, grads


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_gradient_is_scaled_and_no_loss(name: str) -> None:
    plain, scaled = (run(LAYOUTS[name][0], _gradients, *LAYOUTS[name][1:], s) for s in (1, 1024))
    for (loss, norm, grads), (same, larger, of_scaled) in zip(plain, scaled, strict=True):
        assert same == loss and larger == 1024 * norm != 0.0
        for grad, of_it in zip(grads.values(), of_scaled.values(), strict=True):
            assert torch.equal(of_it, 1024 * grad)
