"""In which types sharded gradients are sent and summed."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.data_parallel.communication import set_communication
from fivefold.data_parallel.policy import Policy, make_policy
from fivefold.errors import ConfigError
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of
from tests.pool import run
from tests.verify.cases import LLAMA, STRATEGIES, config, named, shared_groups

CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp16", "fp32", "fp64"),
    "grad_reduce_in_bf16": (False, True),
    "ddp_reduce_scatter_with_fp32_accumulation": (False, True),
    "main_grads_dtype": ("fp32", "bf16"),
}


class _Unit:
    """A unit of FSDP2 without parameters; `reduction` is what it is given to reduce with."""

    reduction: Any = None

    def set_custom_all_gather(self, gather: Any) -> None:
        pass

    def set_custom_reduce_scatter(self, reduction: Any) -> None:
        self.reduction = reduction


def _types(policy: Policy, device: str) -> tuple[torch.dtype, torch.dtype]:
    """That on the wire and that of sums; FSDP2's own reduction has that of gradients for both."""
    unit, mesh = _Unit(), SimpleNamespace(device_type=device, size=lambda axis: 2)
    nodes = SimpleNamespace(hpz=None)
    assert not [*set_communication(unit, [], mesh, policy, nodes)]  # type: ignore[arg-type]
    if unit.reduction is None:
        return policy.gradient_dtype, policy.gradient_dtype
    return unit.reduction._wire_dtype, unit.reduction._sum_dtype


@shared_groups()
def _differ(rank: int, world: int, strategy: str, kept: str) -> list[str]:
    """Gradients that are others where weights are their own masters."""
    grads = []
    for masters in ("fp32", "bf16"):
        settings = config(
            LLAMA,
            num_layers=1,
            precision="bf16",
            use_precision_aware_optimizer=True,
            main_params_dtype=masters,
            main_grads_dtype=kept,
            **named(strategy=strategy),
        )
        engine = Engine(check(settings, world), rank, torch.device("cpu"))
        rows = rows_of(settings, rank, world)
        engine.gradients(microbatches(settings, global_batch(settings, 0), rows))
        grads.append({name: local_tensor(p.grad) for name, p in engine.parameters.items()})
    wide, narrow = grads
    return [name for name in wide if not torch.equal(wide[name], narrow[name])]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", ["fp32", "bf16"])
def test_gradients_do_not_depend_on_how_masters_are_kept(strategy: str, kept: str) -> None:
    """The same weights are computed with, and the same sums made, of several microbatches."""
    assert run(2, _differ, strategy, kept) == [[], []]


@pytest.mark.parametrize("values", product(*CHOICES.values()))
def test_gpus_send_and_sum_in_the_types_that_are_asked_for(values: tuple[Any, ...]) -> None:
    """As CPUs do, on which `verify` proves them: there every reduction is ours."""
    settings = dict(zip(CHOICES, values, strict=True))
    aware = settings["main_grads_dtype"] == "bf16"
    asked = config(
        LLAMA, 2, **named(strategy="optim"), **settings, use_precision_aware_optimizer=aware
    )
    try:
        check(asked, 2)
    except ConfigError:
        pytest.skip("no such run")
    policy = make_policy(asked)
    assert _types(policy, "cuda") == _types(policy, "cpu") == (policy.wire_dtype, policy.sum_dtype)
