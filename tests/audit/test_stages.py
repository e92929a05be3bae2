"""Steps of which each stage recomputes another number of layers, against theory."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from tests.audit.layouts import random_layouts
from tests.audit.test_audit import check_records
from tests.verify.cases import chosen

MODULES = ("core_attn", "mlp", "layernorm", "mla_up_proj")


def layouts_by_stage(seed: int) -> Iterator[Layout]:
    """Random layouts of two stages and more, with a random number of layers for each."""
    random = Random(seed)
    for layout in random_layouts(seed):
        sizes = [len(stage.layers) for stage in layout.split.stages]
        numbers = tuple(random.randint(0, size) for size in sizes)
        modules = tuple(name for name in MODULES if random.random() < 0.4)
        if len(set(numbers)) == 1:
            continue
        settings = {
            "recompute_granularity": "selective" if modules else "full",
            "recompute_modules": modules or ("core_attn",),
            "recompute_method": "block",
            "recompute_num_layers": numbers,
            "recompute_in_flight_limit": None,
            "tiled_mlp_num_shards": 2 if not modules and random.random() < 0.3 else 1,
            "fine_grained_activation_offloading": False,
            "offload_modules": (),
            "mtp_num_layers": random.choice((0, 0, 1)),
        }
        try:
            yield check(layout.config.with_values(**settings), layout.grid.world_size)
        except ConfigError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("number", chosen(range(2), 0))
def test_a_step_does_what_theory_says(number: int, tmp_path: Path) -> None:
    check_records(next(islice(layouts_by_stage(11), number, None)), number, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(40))
def test_many_steps_do_what_theory_says(number: int, tmp_path: Path) -> None:
    check_records(next(islice(layouts_by_stage(12), number, None)), number, tmp_path)
