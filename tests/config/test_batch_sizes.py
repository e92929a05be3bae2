"""Batches that grow: by the rule of Megatron-LM, step by step."""

from hypothesis import example, given
from hypothesis import strategies as st

from fivefold.config.batch_sizes import BatchSizes


@st.composite
def growing(draw: st.DrawFn) -> BatchSizes:
    start, increment = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    full = start + increment * draw(st.integers(1, 30))
    return BatchSizes(full, start, increment, draw(st.integers(1, 3000)))


def by_its_rule(sizes: BatchSizes, samples: int) -> int:
    """`update` of Megatron-LM's calculator, in fractions of floats as there."""
    if samples > sizes.ramp:
        return sizes.full
    each = sizes.ramp / ((sizes.full - sizes.start) // sizes.increment)
    return sizes.start + int(samples / each) * sizes.increment


@given(growing(), st.integers(0, 400))
@example(BatchSizes(8), 5)
@example(BatchSizes(1536, 32, 32, 65_536_000), 300)
@example(BatchSizes(32, 7, 1, 7), 2)  # of which 7 / (7 / 25) is less than 25
def test_sizes_samples_and_steps_are_those_of_a_run_step_by_step(
    sizes: BatchSizes, steps: int
) -> None:
    samples = 0
    for step in range(steps):
        assert sizes.samples(step) == samples and sizes.steps(samples) == step
        size = sizes.at(samples)
        assert sizes.steps(samples + size - 1) == step  # a step that is not whole is none
        if sizes.ramp:
            assert size == by_its_rule(sizes, samples)
        samples += size
    assert sizes.samples(steps) == samples


@given(growing())
def test_levels_are_the_steps_of_each_size(sizes: BatchSizes) -> None:
    *smaller, last = sizes.levels()
    taken: list[int] = []
    for level in smaller:
        assert level.steps is not None and level.first_sample == sum(taken)
        taken += [level.size] * level.steps
    samples = [sum(taken[:step]) for step in range(len(taken) + 1)]
    assert [sizes.at(count) for count in samples] == [*taken, sizes.full]
    assert last.size == sizes.full and last.steps is None and last.first_sample == samples[-1]
    assert sizes.sizes() == sorted({*taken, sizes.full})
