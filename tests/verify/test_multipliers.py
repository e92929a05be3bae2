"""Factors of embeddings, residual branches, logits and scores, in layouts against one device."""

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from tests.verify.cases import LLAMA, MULTIPLIERS, config
from tests.verify.test_layouts import passes
from tests.verify.test_norms import LAYOUTS


# Of the matrix's rows, those of "gpt untied" have all of these factors.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_scale_as_one_device_does(name: str) -> None:
    world, model, settings = LAYOUTS[name]
    z_loss = {"z_loss_coeff": 0.1, "cross_entropy_loss_fusion": True}
    passes(world, model, settings | MULTIPLIERS | z_loss)


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_factors_are_positive(name: str) -> None:
    for value in (0.0, -1.0):
        with pytest.raises(ConfigError, match=f"{name} must be positive, not {value}"):
            check(config(LLAMA, **{name: value}), 1)
