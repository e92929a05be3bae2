"""The executor: every schedule gives the same bits, and holds what its program says, no more."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.model.transformer import Stage
from fivefold.pipeline.executor import Executor
from fivefold.pipeline.ir import Act, Kind, Program, loop_placement, v_placement
from fivefold.pipeline.layout import StageSpec
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import peak_in_flight
from fivefold.tensor.deferred_weight import DeferredWeights, Work, run_works
from fivefold.tensor.install import install_deferral
from tests.model.models import LLAMA, batch_of, build
from tests.pool import run

MODEL = replace(LLAMA, num_layers=4)
TOKENS = 12


class NoReduction:
    """Data parallelism over one rank; remembers what it was asked."""

    def __init__(self) -> None:
        self.lasts: list[bool] = []
        self.reduced = 0

    def before_backward(self, *, whole: bool, last: bool) -> None:
        if whole:
            self.lasts.append(last)

    def run_weights(self, works: Sequence[Work], *, last: bool) -> None:
        self.lasts.append(last)
        for _ in run_works(works):
            pass

    def reduce(self) -> None:
        self.reduced += 1


def _program(name: str, placement: tuple[int, ...], microbatches: int, early: bool) -> Program:
    program = build_program(name, placement, microbatches)
    return with_sharding_actions(lower(eager_dx(program) if early else program))


def _stage(index: int, num_stages: int) -> Stage:
    each = MODEL.num_layers // num_stages
    layers = tuple(range(index * each, (index + 1) * each))
    return build(MODEL, StageSpec(index == 0, layers, index == num_stages - 1))


@dataclass
class Held:
    """The most of some kind of tensors that are alive at a time."""

    refs: list[StorageWeakRef] = field(default_factory=list)
    peak: int = 0

    def add(self, tensor: Tensor) -> None:
        self.refs.append(StorageWeakRef(tensor.untyped_storage()))
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        self.refs = [ref for ref in self.refs if not ref.expired()]
        return len(self.refs)


def _execute(
    rank: int, program: Program, watch: Callable[[dict[int, Stage]], None] = lambda stages: None
) -> tuple[Tensor, dict[str, Tensor], dict[int, NoReduction]]:
    deferred = DeferredWeights()
    stages = {i: _stage(i, program.num_stages) for i in program.stages_of(rank)}
    for stage in stages.values():
        install_deferral(stage, deferred)
    watch(stages)
    gradients = {i: NoReduction() for i in stages}
    batches = [
        batch_of(MODEL, [[5, TOKENS - 5]], seed=mb) for mb in range(program.num_microbatches)
    ]
    executor = Executor(
        stages,
        gradients,
        deferred,
        dist.group.WORLD if program.num_ranks > 1 else None,
        (TOKENS, MODEL.hidden_size),
        torch.float64,
        torch.device("cpu"),
    )
    loss = executor.run(program, batches, 1 / 64)
    grads = {n: p.grad for s in stages.values() for n, p in s.named_parameters()}
    return loss, grads, gradients


def _results(rank: int, world: int, *plan: Any) -> tuple[float, dict[str, bytes]]:
    loss, grads, _ = _execute(rank, _program(*plan))
    return loss.item(), {name: grad.numpy().tobytes() for name, grad in grads.items()}


PLANS = {
    2: [("gpipe", loop_placement(2, 2)), ("1f1b", loop_placement(2, 2))],
    4: [
        ("gpipe", loop_placement(2, 4)),
        ("interleaved_1f1b", loop_placement(2, 4)),
        ("gpipe", v_placement(2, 4)),
    ],
}


@pytest.mark.parametrize("num_stages", PLANS)
def test_every_schedule_gives_the_same_bits(num_stages: int) -> None:
    found = []
    for name, placement in PLANS[num_stages]:
        for early in (False, True):
            ranks = run(2, _results, name, placement, 4, early)
            grads = {name: grad for _, by_name in ranks for name, grad in by_name.items()}
            found.append((sum(loss for loss, _ in ranks), grads))
    one_rank = _results(0, 1, "gpipe", (0,) * num_stages, 4, False)
    assert set(found[0][1]) == set(one_rank[1])
    assert all(other == one_rank for other in found)


def _hold(rank: int, world: int, program: Program) -> dict[str, int]:
    activations, outputs, received = Held(), Held(), Held()
    irecv = dist.irecv

    def watched(buffer: Tensor, **where: Any) -> dist.Work | None:
        received.add(buffer)
        return irecv(buffer, **where)

    def watch(stages: dict[int, Stage]) -> None:
        for stage in stages.values():
            first = next(iter(stage.layers.values()))
            # What the first projections save of a microbatch, from F to the end of BW or W.
            first.input_layernorm.register_forward_hook(lambda m, args, y: activations.add(y))
            stage.register_forward_hook(lambda m, args, y: outputs.add(y))

    dist.irecv = watched
    try:
        _execute(rank, program, watch)
    finally:
        dist.irecv = irecv
    return {
        "activations": activations.peak,
        "outputs": outputs.peak,
        "received": received.peak,
        "left": activations.alive + outputs.alive + received.alive,
    }


def _buffers(acts: tuple[Act, ...]) -> int:
    """The most receive buffers that a rank's acts need: from RECV until the backward has ended."""
    held = peak = 0
    received = Counter((act.stage, act.mb) for act in acts if act.kind is Kind.RECV)
    for act in acts:
        held += act.kind is Kind.RECV
        peak = max(peak, held)
        if act.kind in (Kind.W, Kind.BW):
            held -= received[act.stage, act.mb]
    return peak


HOLDING = [
    ("gpipe", (0, 1), False),
    ("1f1b", (0, 1), False),
    ("1f1b", (0, 1), True),
    ("interleaved_1f1b", (0, 1, 0, 1), False),
    ("interleaved_1f1b", (0, 1, 0, 1), True),
]


@pytest.mark.parametrize(("name", "placement", "early"), HOLDING)
def test_a_rank_holds_what_its_program_has_in_flight(
    name: str, placement: tuple[int, ...], early: bool
) -> None:
    program = _program(name, placement, 8, early)
    peaks = peak_in_flight(program)
    for rank, held in enumerate(run(2, _hold, program)):
        assert held["activations"] == peaks[rank]
        assert held["received"] == _buffers(program.ranks[rank])
        # Under way, about to be sent, and the one being made; not the step's 8 or 16.
        assert held["outputs"] <= 6
        assert held["left"] == 0


def test_buffers_of_1f1b_do_not_grow_with_the_microbatches() -> None:
    for microbatches in (4, 16):
        program = _program("1f1b", (0, 1, 2, 3), microbatches, True)
        in_flight = peak_in_flight(program)
        buffers = [_buffers(acts) for acts in program.ranks]
        assert all(n <= peak + 2 for n, peak in zip(buffers, in_flight, strict=True))


def _told(rank: int, world: int, program: Program) -> None:
    _, _, gradients = _execute(rank, program)
    for told in gradients.values():
        assert told.lasts == [False] * (program.num_microbatches - 1) + [True]
        assert told.reduced == 1


def test_each_stage_is_told_its_last_backward_and_reduced_once() -> None:
    run(2, _told, _program("interleaved_1f1b", (0, 1, 0, 1), 4, True))


def _evaluate(rank: int, world: int, placement: tuple[int, ...]) -> float:
    program = lower(build_program("gpipe", placement, 3, forward_only=True))
    loss, grads, gradients = _execute(rank, program)
    assert all(grad is None for grad in grads.values())
    assert not any(told.lasts or told.reduced for told in gradients.values())
    return loss.item()


def test_an_evaluation_leaves_no_gradients() -> None:
    parts = run(2, _evaluate, (0, 1, 0, 1))
    assert parts[0] == 0.0
    assert parts[1] == _evaluate(0, 1, (0, 0, 0, 0))
