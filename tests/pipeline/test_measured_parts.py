from dataclasses import replace

import pytest

from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.measured_parts import check_same_pieces, measured_pieces
from fivefold.pipeline.split.stages import StageSpec

MODEL = replace(PRESETS["debug-llama"], num_layers=6)
STAGES = (
    StageSpec(True, (0,), False),
    StageSpec(False, (1, 2), False),
    StageSpec(False, (3, 4), False),
    StageSpec(False, (5,), True),
)


def test_pieces_whose_sums_are_the_stages_are_found() -> None:
    """Embedding 0.5, a layer 2, the head 3; dX twice, dW half of that."""
    forward = (2.5, 4.0, 4.0, 5.0)
    costs = Costs(forward, tuple(2 * f for f in forward), tuple(f / 2 for f in forward), 0.1)
    found = measured_pieces(MODEL, STAGES, costs)
    times = {kind: (part.f, part.b, part.w) for kind, part in found.kinds.items()}
    assert list(times) == ["embedding", "dense", "head"]
    for kind, f in (("embedding", 0.5), ("dense", 2.0), ("head", 3.0)):
        assert times[kind] == pytest.approx((f, 2 * f, f / 2))
    assert found.hop == 0.1 and found.unexplained == pytest.approx(0, abs=1e-12)


def test_nothing_takes_less_than_nothing_and_what_is_missed_is_told() -> None:
    costs = Costs((1.8, 4.0, 4.4, 5.0), (1.8, 4.0, 4.4, 5.0), (0.0,) * 4)
    found = measured_pieces(MODEL, STAGES, costs)
    assert found.kinds["embedding"].f == 0
    # Without the embedding the layer is fitted to 1.8 and to half of 4 and 4.4, twice as heavy.
    assert found.kinds["dense"].f == pytest.approx((1.8 + 2 * 4.0 + 2 * 4.4) / 9)
    assert found.unexplained == pytest.approx(2 * (4.4 - 2 * 18.6 / 9) / 10)
    assert "to within 5" in found.lines()[-1]


@pytest.mark.parametrize("stages", [STAGES[::3], (StageSpec(True, tuple(range(6)), True),)])
def test_stages_that_do_not_tell_pieces_apart_are_refused(stages: tuple[StageSpec, ...]) -> None:
    ones = (1.0,) * len(stages)
    with pytest.raises(ConfigError, match="do not tell embedding, dense, head apart") as caught:
        measured_pieces(MODEL, stages, Costs(ones, ones, ones))
    assert "independent sums for 3 unknowns" in str(caught.value)


def test_a_run_tells_of_models_of_the_same_layers_only() -> None:
    check_same_pieces(MODEL, replace(MODEL, num_layers=60))
    wide = replace(MODEL, ffn_hidden_size=2 * MODEL.ffn_size)
    with pytest.raises(ConfigError, match="tells nothing about this model's dense pieces"):
        check_same_pieces(MODEL, wide)
