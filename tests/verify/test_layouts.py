"""Layouts compute what one device computes: to 1e-12 in fp64, to 1e-5 in fp32."""

from typing import Any

import pytest

from tests.verify.cases import MODELS, config, matrix, name, verify_in_pool

WORLDS = (1, 2, 4, 8)
EVERY = [(world, flags) for world in WORLDS for flags in matrix(world)]


def ids(cases: list[tuple[int, dict[str, Any]]]) -> list[str]:
    return [f"{world}: {name(flags)}" for world, flags in cases]


def passes(world: int, model: str, **flags: Any) -> None:
    report = verify_in_pool(world, config(MODELS[model], **flags))
    assert report.passed, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize(("world", "flags"), EVERY, ids=ids(EVERY))
def test_every_layout_in_fp64(world: int, flags: dict[str, Any], model: str) -> None:
    # tied and untied alternate
    other = {"llama": "llama tied", "gpt": "gpt untied"}
    passes(world, other[model] if EVERY.index((world, flags)) % 2 else model, **flags)
