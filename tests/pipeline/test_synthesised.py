"""Programs that were searched for, on uneven stages: the bits of one device."""

from random import Random
from typing import Any

import pytest

from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import Program, loop_placement, v_placement
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import lower
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.synthesise import synthesise
from fivefold.pipeline.validate import validate
from tests.pipeline.runs import bits, one_rank
from tests.pool import run

EFFORT = 20_000
PROGRAMS = 200


def random_program(seed: int, sizes: tuple[int, ...]) -> Program:
    """Searched for random costs under a random cap, with or without recomputation."""
    random = Random(seed)
    ranks, chunks = random.choice(sizes), random.choice((1, 2))
    place = random.choice((loop_placement, v_placement)) if chunks > 1 else loop_placement
    placement = place(ranks, ranks * chunks)

    def times() -> tuple[float, ...]:
        return tuple(random.uniform(0.5, 1.5) for _ in placement)

    problem = Problem(
        placement,
        random.randint(1, 2 * ranks),
        Costs(times(), times(), times(), random.uniform(0, 0.5)),
        random.uniform(3, 3 * ranks),
        Footprint(times()),
    )
    program = synthesise(problem, effort=EFFORT).program
    program = with_recompute(program, random.randint(1, 3)) if random.random() < 0.5 else program
    program = with_sharding_actions(lower(program, problem.costs))
    validate(program)
    return program


def is_one_device(seed: int, sizes: tuple[int, ...]) -> None:
    program = random_program(seed, sizes)
    found: list[Any] = run(program.num_ranks, bits, program, seed)
    grads = {name: grad for _, by_name in found for name, grad in by_name.items()}
    loss, expected = one_rank(1, program.num_microbatches)
    assert sum(part for part, _ in found) == pytest.approx(loss, rel=1e-15)
    assert grads == expected, seed


@pytest.mark.parametrize("seed", range(4))
def test_some_programs_give_the_bits_of_one_device(seed: int) -> None:
    is_one_device(seed, (2, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, PROGRAMS, 20))
def test_many_programs_give_the_bits_of_one_device(first: int) -> None:
    for seed in range(first, first + 20):
        is_one_device(seed, (2, 2, 3, 4, 4, 8))
