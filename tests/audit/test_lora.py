"""Steps that train adapters alone, against theory: everything equal, on every rank."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from fivefold.audit.record import expected_record
from fivefold.check import check
from fivefold.config.model import ModelConfig
from fivefold.config.rules.lora import linear_names
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from tests.audit.layouts import random_layouts
from tests.audit.test_audit import check_records, records_of
from tests.audit.test_experts import CASES, SMALL
from tests.verify.cases import chosen, config, named

pytestmark = pytest.mark.slow
FEW, MANY = 2, 40


def _adapted(model: ModelConfig, random: Random) -> ModelConfig:
    """The model with adapters beside all or two of its linear layers."""
    every = random.random() < 0.5
    targets = ["all-linear"] if every else random.sample(linear_names(model), 2)
    rank = random.choice((1, 3, 4))
    return replace(model, lora_rank=rank, lora_target_modules=tuple(targets))


def _layouts(seed: int) -> Iterator[Layout]:
    random = Random(seed)
    for number, layout in enumerate(random_layouts(seed)):
        kinds = {"use_dora": number % 2 == 0, "lora_dropout": 0.2 * (number % 3 == 0)}
        model = replace(_adapted(layout.config.model, random), **kinds)
        try:
            yield check(replace(layout.config, model=model), layout.grid.world_size)
        except ConfigError:  # what adapters do not go with, such as an optimizer on the host
            continue


@pytest.mark.parametrize("number", range(FEW))
def test_a_step_does_what_theory_says(number: int, tmp_path: Path) -> None:
    check_records(next(islice(_layouts(3), number, None)), number, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(MANY))
def test_many_steps_do_what_theory_says(number: int, tmp_path: Path) -> None:
    check_records(next(islice(_layouts(12), number, None)), number, tmp_path)


@pytest.mark.parametrize(
    "name", chosen(CASES, "one rank, balanced, recomputed", "MTP", "alltoall of 4")
)
def test_frozen_experts_do_what_theory_says(name: str, tmp_path: Path) -> None:
    world, model, values = CASES[name]
    settings = named(**{"precision": "fp32", **values})
    kinds = {"use_dora": len(name) % 2 == 0, "lora_dropout": 0.2 * (len(name) % 3 == 0)}
    adapted = replace(_adapted(replace(SMALL, **model), Random(name)), **kinds)
    try:
        layout = check(config(adapted, **settings), world)
    except ConfigError as error:
        assert "latents of other ranks" in str(error)
        return
    records = records_of(layout, 1, tmp_path)
    for record in records:
        assert expected_record(layout, record, records) == record
