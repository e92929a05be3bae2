"""The executor: every schedule gives the same bits, and holds what its program says, no more."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.model.transformer import Stage
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import Act, Kind, Program, loop_placement, v_placement
from fivefold.pipeline.lowering import lower, unpaired
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import memory_curve, peak_in_flight, simulate
from tests.pipeline.runs import Held, bits, execute, lowered, one_rank
from tests.pool import run

LINE, LOOP, V = loop_placement(2, 2), loop_placement(2, 4), v_placement(2, 4)
PLANS = {
    "gpipe": V,
    "looped_bfs": LOOP,
    "1f1b": LINE,
    "eager_1f1b": LINE,
    "interleaved_1f1b": LOOP,
    "combined_1f1b": LOOP,
    "zb_h1": LINE,
    "zb_h2": LINE,
    "interleaved_zb": LOOP,
    "zb_v": V,
    "v_half": V,
    "v_min": V,
    "dualpipe_v": V,
}
MICROBATCHES = 4


def together(found: list[tuple[float, dict[str, bytes]]]) -> tuple[float, dict[str, bytes]]:
    return sum(loss for loss, _ in found), {n: g for _, grads in found for n, g in grads.items()}


@pytest.fixture(scope="module")
def alone() -> tuple[float, dict[str, bytes]]:
    return one_rank(2, MICROBATCHES)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_every_schedule_gives_the_same_bits(name: str, early: bool, alone: Any) -> None:
    program = lowered(name, PLANS[name], MICROBATCHES, early)
    assert together(run(2, bits, program)) == alone


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("name", ["looped_bfs", "gpipe", "dualpipe_v"])
def test_what_is_recomputed_gives_the_same_bits(name: str, limit: int, alone: Any) -> None:
    program = with_recompute(build_program(name, PLANS[name], MICROBATCHES), limit)
    assert any(act.kind is Kind.R for act in program.ranks[0])
    assert together(run(2, bits, with_sharding_actions(lower(program)))) == alone


def test_a_weight_in_parts_gives_the_same_bits(alone: Any) -> None:
    program = build_program("zb_h1", LINE, MICROBATCHES)
    cut = [
        [replace(act, part=part) for act in acts for part in range(3 if act.kind is Kind.W else 1)]
        for acts in program.ranks
    ]
    program = replace(program, ranks=tuple(map(tuple, cut)))
    assert together(run(2, bits, with_sharding_actions(lower(program)))) == alone


def _sums(rank: int, world: int, program: Program) -> tuple[float, dict[str, Tensor]]:
    loss, grads, _ = execute(rank, program)
    return loss.item(), grads


@pytest.mark.parametrize(
    "program",
    [
        lowered("dualpipe", LINE, MICROBATCHES, False),
        lowered("sliced_1f1b", LINE, MICROBATCHES, True, num_slices=3),
        with_sharding_actions(
            lower(with_recompute(build_program("sliced_1f1b", LINE, MICROBATCHES, num_slices=2), 1))
        ),
    ],
    ids=["two copies", "slices", "slices recomputed"],
)
def test_other_orders_of_summation_are_as_good(program: Program) -> None:
    loss, expected, _ = execute(0, lowered("gpipe", (0, 0), MICROBATCHES, False))
    total: dict[str, Tensor] = {}
    found = run(2, _sums, program)
    for _, grads in found:
        for name, grad in grads.items():
            total[name] = total[name] + grad if name in total else grad
    assert sum(part for part, _ in found) == pytest.approx(loss.item(), rel=1e-13)
    assert set(total) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(total[name], grad, rtol=1e-12, atol=1e-14)


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
        execute(rank, program, watch)
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
    program = lowered(name, placement, 8, early)
    peaks = peak_in_flight(program)
    for rank, held in enumerate(run(2, _hold, program)):
        assert held["activations"] == peaks[rank]
        assert held["received"] == _buffers(program.ranks[rank])
        # Under way, about to be sent, and the one being made; not the step's 8 or 16.
        assert held["outputs"] <= 6
        assert held["left"] == 0


def test_buffers_of_1f1b_do_not_grow_with_the_microbatches() -> None:
    for microbatches in (4, 16):
        program = lowered("1f1b", (0, 1, 2, 3), microbatches, True)
        in_flight = peak_in_flight(program)
        buffers = [_buffers(acts) for acts in program.ranks]
        assert all(n <= peak + 2 for n, peak in zip(buffers, in_flight, strict=True))


def _told(rank: int, world: int, program: Program, whole: bool) -> None:
    _, _, gradients = execute(rank, program)
    for stage, told in gradients.items():
        assert told.lasts == [False] * (program.num_microbatches - 1) + [True]
        assert told.reduced == 1
        assert told.forwards == [False, False, False, whole or stage == 0]


@pytest.mark.parametrize("whole", [False, True])
def test_each_stage_is_told_its_last_backward_and_reduced_once(whole: bool) -> None:
    """Also the forward of the last one, if that makes weight gradients, too; the first stage's
    always does, as nobody waits for its dX."""
    run(2, _told, lowered("interleaved_1f1b", (0, 1, 0, 1), 4, not whole), whole)


def _evaluate(rank: int, world: int, placement: tuple[int, ...]) -> float:
    program = lower(build_program("gpipe", placement, 3, forward_only=True))
    loss, grads, gradients = execute(rank, program)
    assert all(grad is None for grad in grads.values())
    assert not any(told.lasts or told.reduced for told in gradients.values())
    return loss.item()


def test_an_evaluation_leaves_no_gradients() -> None:
    parts = run(2, _evaluate, (0, 1, 0, 1))
    assert parts[0] == 0.0
    assert parts[1] == _evaluate(0, 1, (0, 0, 0, 0))


def _measured_curve(rank: int, world: int, program: Program) -> list[int]:
    """How many microbatches' activations live as each act starts and ends."""
    held, seen = Held(), [0]

    @contextmanager
    def observe(act: Act) -> Iterator[None]:
        seen.append(held.alive)
        yield
        seen.append(held.alive)

    def watch(stages: dict[int, Stage]) -> None:
        for stage in stages.values():
            first = next(iter(stage.layers.values()))
            first.input_layernorm.register_forward_hook(lambda m, args, y: held.add(y))

    execute(rank, program, watch, observe=observe)
    return [count for count, _ in groupby(seen)]


CURVES = [
    ("1f1b", (0, 1), None),
    ("1f1b", (0, 1), 1),
    ("zb_h1", (0, 1), None),
    ("zb_v", (0, 1, 1, 0), None),
    ("zb_v", (0, 1, 1, 0), 2),
    ("dualpipe_v", (0, 1, 1, 0), None),
    ("dualpipe", (0, 1), None),
]


@pytest.mark.parametrize(("name", "placement", "limit"), CURVES)
def test_the_measured_memory_is_the_simulated_one(
    name: str, placement: tuple[int, ...], limit: int | None
) -> None:
    program = unpaired(build_program(name, placement, 6))
    program = with_recompute(program, limit) if limit else program
    simulation = simulate(program, Costs.uniform(program.num_stages))
    curves = memory_curve(program, simulation)
    found = run(2, _measured_curve, with_sharding_actions(lower(program)))
    for curve, measured in zip(curves, found, strict=True):
        assert measured == [held for held, _ in groupby(held for _, held in curve)]
