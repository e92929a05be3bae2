"""Draws layouts and settings for the stub: what the engine runs on GPUs, of tiny models."""

from dataclasses import replace
from random import Random
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import check_kernels
from tests.verify import matrix
from tests.verify.any_settings import draw
from tests.verify.cases import EXPERTS, LATENT, MIXTURE, MODELS, config

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
UGLY = MODELS | {"mixture": MIXTURE, "latent experts": replace(LATENT, **EXPERTS)}
EVEN = ("debug-llama", "debug-mixtral", "debug-gpt-oss", "debug-deepseek-v3")
"""Models whose widths suit the kernels of GPUs."""
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
ROWS = matrix.read()


def drawn(seed: int, ranks: int, capability: tuple[int, int] = HOPPER) -> Config:
    """A legal configuration for so many ranks, on GPUs of this compute capability."""
    random = Random(seed)
    while True:
        row = random.choice([None, *(row for row in ROWS if matrix.ranks(row) == ranks)])
        try:
            return _drawn(random, ranks, row if random.random() < 0.8 else None, capability)
        except ConfigError:
            continue


def _drawn(
    random: Random, ranks: int, row: matrix.Row | None, capability: tuple[int, int]
) -> Config:
    base: dict[str, Any] = {"global_batch_size": ranks} if row is None else matrix.settings(row)
    if random.random() < 0.8:
        base["precision"] = "bf16"
    if random.random() < 0.15:
        base |= COMPILED
    if row is not None and random.random() < 0.5:
        model = MODELS[row["family"]]
    else:
        model = random.choice([*map(resolve_model, EVEN), *UGLY.values()])

    def layout_of(more: dict[str, Any]) -> Layout:
        found = config(model, **(base | more))
        check_kernels(found, capability)
        return check(found, ranks)

    layout_of({})
    return layout_of(draw(random, layout_of)).config
