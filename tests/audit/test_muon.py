"""Steps whose matrices are put together and orthogonalised, against theory: everything equal."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from fivefold.audit.record import expected_record
from fivefold.check import check
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from tests.audit.layouts import random_layouts
from tests.audit.test_audit import check_records, records_of
from tests.audit.test_experts import CASES, SMALL
from tests.verify.cases import chosen, config, named

pytestmark = pytest.mark.slow


def _layouts(seed: int) -> Iterator[Layout]:
    for layout in random_layouts(seed):
        try:
            yield check(layout.config.with_values(optimizer="muon"), layout.grid.world_size)
        except ConfigError:  # what Muon does not go with, such as an optimizer on the host
            continue


@pytest.mark.parametrize("number", chosen(range(40), 1))
def test_a_step_does_what_theory_says(number: int, tmp_path: Path) -> None:
    check_records(next(islice(_layouts(5), number, None)), number, tmp_path)


@pytest.mark.parametrize("name", chosen(CASES, "alltoall of 4"))
def test_experts_do_what_theory_says(name: str, tmp_path: Path) -> None:
    world, model, values = CASES[name]
    settings = named(**{"precision": "fp32", **values}) | {"optimizer": "muon"}
    layout = check(config(replace(SMALL, **model), world, **settings), world)
    records = records_of(layout, 1, tmp_path)
    for record in records:
        assert expected_record(layout, record, records) == record
