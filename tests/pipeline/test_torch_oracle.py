"""The executor against torch.distributed.pipelining: the same gradients for every schedule of both.

The model's stages are the same modules. Torch's take a tensor and know no microbatch, so a counter
says which one it is: every schedule runs a stage's forwards in the order of the microbatches.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.model.batch import Batch
from fivefold.pipeline.ir import loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.run.executor import Executor
from fivefold.pipeline.run.interleaver import Interleaver
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.split.stages import StageSpec
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.install import install_deferral
from tests.model.models import LLAMA, batch_of, build
from tests.pipeline.runs import NoReduction
from tests.pool import run

MODEL = replace(LLAMA, num_layers=4)
TOKENS, MICROBATCHES, SCALE = 6, 4, 1 / 16
PAIRS = {
    "gpipe": ("ScheduleGPipe", loop_placement(2, 2)),
    "1f1b": ("Schedule1F1B", loop_placement(2, 2)),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", loop_placement(2, 4)),
    "looped_bfs": ("ScheduleLoopedBFS", loop_placement(2, 4)),
    "interleaved_zb": ("ScheduleInterleavedZeroBubble", loop_placement(2, 4)),
    "zb_v": ("ScheduleZBVZeroBubble", v_placement(2, 4)),
    "dualpipe_v": ("ScheduleDualPipeV", v_placement(2, 4)),
}


def _batches() -> list[Batch]:
    return [batch_of(MODEL, [[2, TOKENS - 2]], seed=mb) for mb in range(MICROBATCHES)]


def _stages(rank: int, placement: tuple[int, ...]) -> dict[int, nn.Module]:
    each, last = MODEL.num_layers // len(placement), len(placement) - 1
    return {
        stage: build(
            MODEL,
            StageSpec(stage == 0, tuple(range(stage * each, (stage + 1) * each)), stage == last),
        )
        for stage, owner in enumerate(placement)
        if owner == rank
    }


def _gradients(stages: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {n: p.grad for stage in stages.values() for n, p in stage.named_parameters()}


def _ours(rank: int, name: str, placement: tuple[int, ...]) -> dict[str, Tensor]:
    program = eager_dx(build_program(name, placement, MICROBATCHES))
    deferred, stages = DeferredWeights(), _stages(rank, placement)
    for stage in stages.values():
        install_deferral(stage, deferred, recomputes=False)
    executor = Executor(
        stages,
        {stage: NoReduction() for stage in stages},
        deferred,
        dist.group.WORLD,
        (TOKENS, MODEL.hidden_size),
        torch.float64,
        torch.device("cpu"),
        Interleaver(torch.device("cpu")),
    )
    executor.run(
        with_sharding_actions(lower(program)), _batches(), torch.tensor(SCALE, dtype=torch.float64)
    )
    return _gradients(stages)


class _ForTorch(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.batches = stage, iter(_batches())

    def forward(self, x: Tensor) -> Tensor:
        out = self.stage(None if self.stage.parts.embedding else x[0], next(self.batches))
        out = out.reshape(1) * SCALE if self.stage.parts.head else out[None].clone()
        return out  # torch detaches it in place, which no view allows


def _torchs(rank: int, schedule: str, placement: tuple[int, ...]) -> dict[str, Tensor]:
    from torch.distributed import pipelining

    stages = _stages(rank, placement)
    hidden = torch.zeros(1, TOKENS, MODEL.hidden_size, dtype=torch.float64)
    token, loss = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    last = len(placement) - 1
    wrapped = [
        pipelining.PipelineStage(
            _ForTorch(module),
            stage,
            len(placement),
            torch.device("cpu"),
            input_args=(token if stage == 0 else hidden.clone().requires_grad_(),),
            output_args=(loss if stage == last else hidden.clone().requires_grad_(),),
            group=dist.group.WORLD,
        )
        for stage, module in stages.items()
    ]
    single = schedule in ("ScheduleGPipe", "Schedule1F1B")
    cls: Any = getattr(pipelining, schedule)
    runner = cls(
        wrapped[0] if single else wrapped,
        MICROBATCHES,
        loss_fn=lambda out, target: out.sum(),
        scale_grads=False,
    )
    inputs = (torch.zeros(MICROBATCHES, 1, dtype=torch.float64),) if 0 in stages else ()
    targets = {"target": torch.zeros(MICROBATCHES)} if last in stages else {}
    runner.step(*inputs, **targets)
    return _gradients(stages)


def _errors(rank: int, world: int, name: str) -> dict[str, float]:
    """Of each parameter's gradient, relative to its norm."""
    schedule, placement = PAIRS[name]
    ours, torchs = _ours(rank, name, placement), _torchs(rank, schedule, placement)
    assert set(ours) == set(torchs)
    return {n: ((ours[n] - torchs[n]).norm() / torchs[n].norm()).item() for n in ours}


@pytest.mark.parametrize("name", PAIRS)
def test_torch_computes_the_same_gradients(name: str) -> None:
    if name.endswith("_v") and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 sends between stages of one rank, which gloo cannot")
    errors = {key: error for each in run(2, _errors, name) for key, error in each.items()}
    assert len(errors) == 3 + 9 * MODEL.num_layers
    assert max(errors.values()) < 1e-12, errors
