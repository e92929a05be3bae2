"""Layouts and settings that nobody thought of together, where CUDA and NCCL only pretend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.config.config import Config
from fivefold.config.sources import to_toml
from tests.gpu_stub.drawn import AMPERE, BLACKWELL, HOPPER, drawn
from tests.gpu_stub.stub import disagreements, faults, needs_stub, steps
from tests.verify.cases import chosen

pytestmark = [needs_stub, pytest.mark.slow, pytest.mark.timeout(900)]

TOGETHER = 4
"""Layouts that the same processes run in turn: a start takes as long as one of them."""
RUNS = [(ranks, gpus, number) for number in range(25) for ranks in (2, 4) for gpus in (8, 1)]
"""Ranks, GPUs, and which of the drawn layouts."""
GPUS = (HOPPER, BLACKWELL, AMPERE)
"""Capabilities of the GPUs, by turns: they have other kernels."""


@pytest.mark.parametrize("run", chosen(RUNS, (2, 8, 0), (4, 8, 0), (2, 1, 1)), ids=str)
def test_what_goes_together_has_no_races_and_waits_once_a_step(
    run: tuple[int, int, int], tmp_path: Path
) -> None:
    ranks, gpus, number = run
    seeds = range(number * TOGETHER, (number + 1) * TOGETHER)
    capability = GPUS[number % len(GPUS)]
    configs = [drawn(seed, ranks, capability) for seed in seeds]
    words = _words(tmp_path, configs, ranks)
    found = steps(tmp_path, *words, gpus=gpus, capability=capability, seconds=900)
    assert len(found) == len(configs) * ranks
    wrong = [
        f"seed {seeds[report['layout']]} on {ranks} ranks: {fault}"
        for report in found
        for fault in faults(report, configs[report["layout"]], own_gpu=gpus > 1)
    ]
    assert not wrong, "\n".join(wrong)
    assert not disagreements(tmp_path)


def _words(folder: Path, configs: list[Config], ranks: int) -> Iterator[str]:
    for number, config in enumerate(configs):
        file = folder / f"{number}.toml"
        file.write_text(to_toml(config, changes_only=True))
        yield from ("+", str(file), "--nproc", str(ranks))
