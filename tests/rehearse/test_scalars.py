"""No step multiplies, or adds, what is narrow with a scalar of the device that is wider: GPUs round
the scalar to the narrow type first, where CPUs, which all other proofs run on, do not."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fivefold.audit.watch import Watch, project_line, tensors_in
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.mesh.device import multiply_
from fivefold.rehearse.kernels import one_kernel_each
from fivefold.rehearse.roles import rehearsed_layout
from fivefold.rehearse.run import watched_step
from fivefold.rehearse.shadow import Shadow
from fivefold.rehearse.world import pretended_world
from tests.gpu_stub.drawn import drawn

FUSED = {"precision": "bf16", "cross_entropy_loss_fusion": True}
NARROW = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
STEPS = (
    ("debug-llama", FUSED | NARROW),
    ("debug-mixtral", FUSED | {"precision": "fp16"}),
)
RANKS = 2


class Rounded(Watch):
    """Operations of GPUs that round a scalar, by the line of the project."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        floats = [x for x in tensors_in([*args, *kwargs.values()]) if x.is_floating_point()]
        narrow = [x.itemsize for x in floats if x.dim()]
        scalars = [x.itemsize for x in floats if not x.dim()]
        if narrow and scalars and max(narrow) < max(scalars) and "copy" not in func.name():
            self.found.add(f"{func.name()} {project_line()}")
        return super()._run(func, args, kwargs)


def rounded(config: Config) -> set[str]:
    watch = Rounded()
    layout = rehearsed_layout(check(config, RANKS))
    with pretended_world(0, RANKS, gpus=True), one_kernel_each():
        watched_step(layout, 0, Shadow(gpus=True), watch)
    return watch.found


@pytest.mark.parametrize("step", STEPS, ids=[model for model, _ in STEPS])
@pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
def test_no_scalar_is_rounded_before_it_is_used(step: tuple[str, dict[str, Any]]) -> None:
    model, settings = step
    assert not rounded(Config(resolve_model(model)).with_values(**settings))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")
def test_no_scalar_of_any_layout_is_rounded(seed: int) -> None:
    config = drawn(seed, RANKS)
    assert not rounded(config.with_values(compile=False, compile_backend="inductor"))


def test_products_by_scalars_are_rounded_once() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    factor = torch.tensor(1 / 3)
    assert torch.equal(multiply_(x.clone(), factor), (x.float() * factor).bfloat16())
