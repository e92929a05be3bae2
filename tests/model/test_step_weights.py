"""Weights in 8 bits that the microbatches of a step share: the same bits, made once."""

from collections import Counter
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.counts.policy import layout_policy
from fivefold.counts.state import stage_narrow
from fivefold.mesh.slices import local_tensor
from fivefold.model.eight_bit.delayed import WEIGHT
from fivefold.model.eight_bit.fp8 import Scaled
from fivefold.model.eight_bit.layers import eight_bit_layers
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.eight_bit.step_weights import StepWeights
from fivefold.model.moe.grouped import GroupedLinear
from fivefold.train.engine import Engine
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import (
    LATENT,
    LLAMA,
    MIXTURE,
    MODELS,
    chosen,
    config,
    flags,
    named,
    shared_groups,
)

STEPS = 2
E4M3 = {"precision": "bf16", "fp8_format": "e4m3"}
ROWS, BLOCKS = {"fp8_recipe": "rowwise"}, {"fp8_recipe": "blockwise"}
PAIR, DEFERRED = flags(pp=2, stages="Et|ttL"), {"pipeline_schedule": "zb_h1"}
SLICED = {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2}
# (ranks, model, settings)
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one rank, delayed": (1, LLAMA, flags()),
    "layers again": (1, LLAMA, flags() | BLOCKS | {"recompute_granularity": "full"}),
    "one rank, tied": (1, MODELS["llama tied"], flags() | ROWS),
    "ZeRO-1, mxfp8": (2, LLAMA, flags(strategy="optim") | {"fp8_recipe": "mxfp8"}),
    "ZeRO-2, tokens in parts": (
        4,
        MODELS["gpt"],
        flags(tp=2, sequence=True, strategy="optim_grads") | ROWS | {"tp_comm_overlap": True},
    ),
    "deferred, split": (
        4,
        LATENT,
        flags(tp=2, pp=2, stages="Et|ttL") | {"pipeline_schedule": "zb_h1"},
    ),
    "two copies": (2, LLAMA, flags(pp=2, stages="Et|ttL") | {"pipeline_schedule": "dualpipe"}),
    "slices": (2, LLAMA, flags(pp=2, stages="Et|ttL") | SLICED | ROWS),
    "experts, delayed": (2, MIXTURE, named(ep=2)),
    "experts, by rows": (2, MIXTURE, named(ep=2, strategy="optim") | ROWS),
}
Run = tuple[list[float], dict[str, bytes], float, float, float]


@shared_groups()
def _trained(rank: int, world: int, case: str, again: bool) -> Run:
    """Losses and norms, this rank's weights after some steps; how often each of its weights was
    quantised in a step, bytes of what was kept of them, and the bytes that are expected."""
    _, model, settings = CASES[case]
    asked = config(model, world, **E4M3 | settings | {"disable_parameter_transpose_cache": again})
    layout = check(asked, world)
    engine = Engine(layout, rank, torch.device("cpu"))
    made: Counter[str] = Counter()
    quantised, once = EightBit._quantised, StepWeights.once

    def counted(self: EightBit, x: torch.Tensor, block: Any, operand: int) -> Scaled:
        made["weights"] += operand == WEIGHT
        return quantised(self, x, block, operand)

    def weighed(self: StepWeights, *args: Any) -> Scaled:
        found = once(self, *args)
        kept = (self._made or {}).values()
        made["bytes"] = max(made["bytes"], sum(x.bits.nbytes for x in kept))
        return found

    numbers: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EightBit, "_quantised", counted)
        patch.setattr(StepWeights, "once", weighed)
        for step in range(STEPS):
            result = engine.step(own_batch(engine, step))
            numbers += [result.loss, result.grad_norm]
    assert not engine.model.step_weights._made
    updated = engine.optimizer.weights().items()
    weights = {name: piece.local.detach().numpy().tobytes() for name, piece in updated}
    parts, policy = layout.stages_of(engine.groups.at["pp"]).values(), layout_policy(layout)
    expected = 2 * sum(stage_narrow(layout, part, policy) for part in parts)
    count = 0
    for stage in engine.model.stages.values():
        for module, _ in eight_bit_layers(stage).values():
            count += len(local_tensor(module.weight)) if isinstance(module, GroupedLinear) else 1
    return numbers, weights, made["weights"] / count / STEPS, made["bytes"], expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(CASES, "experts, by rows"),
)
def test_each_weight_is_quantised_twice_a_step_and_nothing_else_changes(case: str) -> None:
    ranks = CASES[case][0]
    for kept, again in zip(
        run(ranks, _trained, case, False), run(ranks, _trained, case, True), strict=True
    ):
        assert kept[0] == again[0] and kept[1] == again[1]  # to the bit
        assert kept[2] == 2 and again[2] >= 4 and not again[3]
        assert kept[3] == pytest.approx(kept[4], rel=0.04)  # scales of mxfp8, a share of keys
