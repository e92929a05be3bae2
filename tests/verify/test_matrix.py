"""Every two settings that can go together, in rows of as many as can: each row computes what one
device computes, and sends the bytes that the formulas say."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.audit.routed import ChosenExperts
from fivefold.audit.traffic import Traffic, axes_of
from fivefold.config.config import Config
from fivefold.counts.routed import StepChoices, StepRows, rows_of_choices
from fivefold.counts.volumes import by_axis, step_volumes
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.step_result import DeviceResult, StepResult
from fivefold.verify.report import VerifyReport
from tests.verify import matrix
from tests.verify.cases import MODELS, STEPS, compare_on_rank, config, loaded, verify_in_pool
from tests.verify.matrix import AXES, Facet, Row

ROWS = matrix.read()
# On at most eight ranks, with more than one shard wherever anything is sharded.
IMPOSSIBLE: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("pipeline", "sliced", "context", ("p2p", "all_gather", "a2a", "a2a+p2p")),  # both cut rows
    ("pipeline", "sliced", "memory", ("layers",)),  # later slices need keys and values
    ("pipeline", "one", "memory", ("stages",)),  # a microbatch at a time
    ("pipeline", "sliced", "weights", ("deferred",)),
    ("pipeline", "sliced", "further", ("some",)),
    ("pipeline", "copies", "weights", ("at once",)),
    ("pipeline", "sliced", "family", ("latent",)),  # later slices need keys and values
    ("sharding", "no_shard", "replicas", ("2",)),
    ("tp", "4 split", "replicas", ("2",)),  # sixteen ranks
    ("tp", "2", "experts", ("alltoall", "flex", "allgather")),  # would send the same tokens twice
    ("tp", "4 split", "context", ("a2a", "a2a+p2p")),  # four heads
]
EXCUSED = {
    frozenset({(axis, kind), (other, of_other)})
    for axis, kind, other, kinds in IMPOSSIBLE
    for of_other in kinds
}


def _facets() -> dict[str, list[Facet]]:
    """All of each axis, `weights` too, which follows from the schedule."""
    kinds = {axis: {matrix.kind(choice) for choice in choices} for axis, choices in AXES.items()}
    kinds |= {"weights": {"at once", "deferred"}}
    return {axis: [(axis, kind) for kind in sorted(of_axis)] for axis, of_axis in kinds.items()}


@pytest.mark.slow
def test_every_two_settings_that_can_be_together_are() -> None:
    proven = set().union(*map(matrix.covered, ROWS))
    pairs = {
        frozenset(pair)
        for one, other in combinations(_facets().values(), 2)
        for pair in product(one, other)
    }
    assert pairs - proven == EXCUSED
    assert {(axis, choice) for axis in AXES for choice in AXES[axis]} <= proven
    assert all(map(matrix.legal, ROWS))


@pytest.mark.parametrize("pair", sorted(map(sorted, EXCUSED)), ids=str)
def test_what_is_never_together_cannot_be(pair: list[Facet]) -> None:
    random = Random(0)
    draws = [matrix.draw(random, *pair) for _ in range(40)]
    assert not any(set(pair) <= matrix.facets(row) and matrix.legal(row) for row in draws)


def _name(row: Row) -> str:
    others = [choice for axis, choice in row.items() if choice != next(iter(AXES[axis]))]
    return f"{matrix.ranks(row)}: {', '.join(others)}"


def _proven_elsewhere(row: Row) -> bool:
    """Whether it is of families, experts or settings that files of their own prove, too."""
    stages = row["memory"].startswith("stages")
    return row["family"] in ("latent", "sinks") or stages or row["experts"] != "none"


def _most(rows: list[Row], share: float) -> list[Row]:
    """The rows that prove this share of what all of them prove, at the least cost."""
    proofs = {number: matrix.covered(row) for number, row in enumerate(rows)}
    every = set().union(*proofs.values())
    found: set[Any] = set()
    taken = []
    while len(found) < share * len(every):
        best = max(proofs, key=lambda n: len(proofs[n] - found) / matrix.cost(rows[n]))
        found |= proofs.pop(best)
        taken.append(rows[best])
    return taken


QUICK = _most([row for row in ROWS if not _proven_elsewhere(row)], 0.5)
RUN = [row if row in QUICK else pytest.param(row, marks=pytest.mark.exhaustive) for row in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("row", RUN, ids=_name)
def test_every_row_is_exact_and_sends_what_the_formulas_say(row: Row) -> None:
    settings = config(MODELS[row["family"]], **matrix.settings(row))
    report = verify_in_pool(matrix.ranks(row), settings, on_rank=measured, steps=STEPS)
    assert report.passed, report.text()
    assert report.steps == STEPS and None not in report.max_rel_error.values()


def measured(
    rank: int, world_size: int, layout: Layout, trace: Path, *others: Any
) -> VerifyReport | None:
    """Compare with one device, and what the last step sent with theory."""
    steps = len(loaded(trace))
    gradients, apply = Engine.gradients, Engine.apply
    watch: Traffic
    chosen: ChosenExperts

    def watched_gradients(engine: Engine, *batches: Any) -> DeviceResult:
        nonlocal watch, chosen
        if engine.steps < steps - 1:  # watching takes as long as the step
            return gradients(engine, *batches)
        watch = Traffic(axes_of(engine.groups))
        chosen = ChosenExperts(engine.model.stages, engine.groups)
        with watch, chosen:
            return gradients(engine, *batches)

    def watched_apply(engine: Engine, result: DeviceResult) -> StepResult:
        if engine.steps < steps - 1:
            return apply(engine, result)
        with watch:
            applied = apply(engine, result)
        every = [StepChoices()] * world_size
        dist.all_gather_object(every, chosen.choices)
        rows = rows_of_choices(engine.layout, rank, every)
        sent, expected = watch.by_axis, _expected(engine.layout, rank, rows)
        if "cp" in expected and not _sends_all(engine.layout.config):
            assert sent.get("cp", 0.0) <= _expected(_without_window(engine.layout), rank)["cp"]
            sent["cp"] = expected["cp"]
        assert sent == expected, f"sent {sent}, expected {expected}"
        checked.append(engine.steps)
        return applied

    checked: list[int] = []
    with (
        patch.object(Engine, "gradients", watched_gradients),
        patch.object(Engine, "apply", watched_apply),
    ):
        report = compare_on_rank(rank, world_size, layout, trace, *others)
    if report is not None and report.passed:
        assert checked == [steps]
    return report


def _expected(layout: Layout, rank: int, rows: StepRows | None = None) -> dict[str, float]:
    return by_axis(step_volumes(layout, rank, rows))


def _sends_all(settings: Config) -> bool:
    """Whether keys and values go to all context-parallel ranks, seen by their documents or not."""
    return settings.parallel.cp_comm_type == ("a2a",) or not settings.data.reset_attention_mask


def _without_window(layout: Layout) -> Layout:
    return replace(
        layout, config=layout.config.with_values(window_size=None, attention_chunk_size=None)
    )
