"""A checkpoint of another model says what to type, so that the model is its own."""

import shlex
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fivefold.check import check
from fivefold.cli.train import Options
from fivefold.config.config import SECTION_SETTINGS, Config
from fivefold.config.model import ModelConfig
from fivefold.config.sources import load, to_toml
from fivefold.errors import CheckpointError
from fivefold.train.folder.saved_state import same_model
from tests.verify.any_settings import ALL, draw
from tests.verify.cases import config

OF_MODELS = {setting.name for setting in SECTION_SETTINGS["model"]}


def drawn(random: Random, kind: ModelConfig) -> Config:
    """A model of a kind with some of its settings changed."""

    def changed(values: dict[str, Any]) -> Config:
        of_model = {name: value for name, value in values.items() if name in OF_MODELS}
        return config(kind, **of_model)

    return changed(draw(random, lambda values: check(changed(values), 1)))


def differs(model: ModelConfig, other: ModelConfig) -> str:
    try:
        same_model(asdict(model), other, Path("run"), by_flags=True)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", range(2))
def test_the_flags_that_are_offered_make_it_the_same_model(part: int, tmp_path: Path) -> None:
    recipe, told = tmp_path / "recipe.toml", 0
    for seed in range(part, 24, 2):
        random = Random(seed)
        theirs, ours = (drawn(random, random.choice([*ALL.values()])) for _ in range(2))
        said = differs(theirs.model, ours.model)
        if not said:
            continue
        told += 1
        recipe.write_text(to_toml(ours))
        flags = shlex.split(said.partition("works: ")[2])
        _, again = load([str(recipe), *flags], Options)
        assert not differs(theirs.model, again.model), said
    assert told > 5
