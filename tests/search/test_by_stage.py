"""Where a layout fits only with recomputation, the search finds the fewest layers of each stage."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.config.sources import read_config
from fivefold.errors import ConfigError
from fivefold.predict.times.layer import TimesCache
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.request import Request
from fivefold.search.search import legal_space, search
from fivefold.tell.export.megatron_memory import one_number
from fivefold.tell.within import within
from tests.search.test_search import asked

LINE = (
    "debug --cluster H100 --gpus 4 --gbs 16 --mbs 1 --seq-length 2048 --tp 1 --cp 1 "
    "--ffn-hidden-size 1792 --max-position-embeddings 2048 --hidden-size 640 --num-layers 8 "
    "--pipeline-schedule 1f1b --data-parallel-sharding-strategy optim "
    "--cross-entropy-loss-fusion --offload-modules none"
)


def everything(request: Request) -> Iterator[Candidate]:
    """All legal layouts, and those with recomputation with every number of each stage's layers."""
    space = legal_space(request)
    cache: TimesCache = {}
    for row in range(len(space)):
        layout = request.checked(space.config_of(row))
        whole = evaluate(request, layout, always=True, times_cache=cache)
        yield whole
        if whole.layout.config.memory.recompute_granularity is None:
            continue
        stages = whole.layout.split.stages
        for numbers in product(*(range(len(stage.layers) + 1) for stage in stages)):
            config = whole.layout.config.with_values(
                recompute_method="block", recompute_num_layers=numbers
            )
            try:
                layout = request.checked(config)
            except ConfigError:  # no layer of any stage
                continue
            yield evaluate(request, layout, always=True, times_cache=cache)


@cache
def found_by_trying() -> tuple[Request, tuple[Candidate, ...]]:
    request = asked(LINE)
    return request, tuple(everything(request))


def within_bytes(request: Request, size: float) -> Request:
    return replace(request, cluster=request.cluster.within(size))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.2, 0.3, 0.5, 0.7, 0.95])
def test_the_search_finds_the_fastest_of_all_numbers(share: float) -> None:
    request, every = found_by_trying()
    peaks = sorted(c.memory.max_allocated for c in every)
    room = peaks[int(share * len(peaks))] + 1
    fastest = min(c.seconds for c in every if c.memory.max_allocated <= room)
    result = search(within_bytes(request, room))
    # One layer more than needed may save up to a thousandth: more backward hides a reduction.
    found = min(c.seconds for c in result.found)
    assert fastest * (1 - 1e-12) <= found <= fastest * 1.001
    assert all(c.memory.max_allocated <= room for c in result.found)


def by_stage() -> tuple[Request, float]:
    """A request whose best layout has several numbers, and the bytes of a device."""
    request, every = found_by_trying()
    peaks = sorted(c.memory.max_allocated for c in every)
    room = peaks[int(0.05 * len(peaks))] + 1
    return within_bytes(request, room), room


def test_numbers_by_stage_save_a_twentieth_of_the_step() -> None:
    request, _ = by_stage()
    best = search(request).best
    memory = best.layout.config.memory
    assert len(set(memory.recompute_num_layers)) > 1
    alike = search(request.among({"recompute_method": frozenset({"uniform"})})).best
    assert best.seconds < 0.95 * alike.seconds


def test_megatron_gets_one_number_for_all_stages() -> None:
    request, _ = by_stage()
    result = search(request)
    found, (note,) = within(result, "megatron")
    assert not one_number(result.best.layout.config.memory)
    assert one_number(found.best.layout.config.memory)
    assert found.best.seconds > result.best.seconds
    assert note.startswith("Megatron-LM cannot recompute ") and "planned again" in note
    assert within(result, "deepspeed") == (result, ())


def test_the_recipe_of_a_plan_has_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request, room = by_stage()
    best = search(request).best.layout
    line = f"plan {LINE} --memory-budget {int(room)} --emit"
    assert main([*shlex.split(line), "fivefold"]) == 0
    recipe = tmp_path / "plan.toml"
    recipe.write_text(capsys.readouterr().out)
    assert read_config(str(recipe)).memory == best.config.memory
    assert main(["train", str(recipe), "--nproc", "4", "--dry-run"]) == 0
    numbers = best.config.memory.recompute_num_layers
    assert " + ".join(map(str, numbers)) in capsys.readouterr().out
    assert main([*shlex.split(line), "megatron"]) == 0
    assert "planned again" in capsys.readouterr().err
