"""What a budget makes a layout recompute and offload is the fastest of all that fits."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.sources import read_config, to_toml
from fivefold.errors import ConfigError
from fivefold.predict.cluster import Cluster, load_cluster
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.memory_budget import fit_memory
from fivefold.search.request import Request
from fivefold.units import read_bytes

SMALL: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 6,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "hidden_size": 512,
    "ffn_hidden_size": 1408,
}
DENSE = ("core_attn", "mlp", "layernorm")
EXPERTS = ("core_attn", "moe", "moe_act", "routed_experts", "layernorm")
MOVES = ("attn_norm", "core_attn", "attn_proj", "mlp_norm")
TENSORS = ("pre_mlp_layernorm_output", "layer_input")
QUANTILES = (0.0, 0.02, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [each for size in range(len(names) + 1) for each in combinations(names, size)]


def ways(modules: tuple[str, ...], layers: int) -> Iterator[dict[str, Any]]:
    for chosen in subsets(modules):
        kind = "selective" if chosen else None
        values = {"recompute_modules": chosen} if chosen else {}
        yield {"recompute_granularity": kind, **values}
    for method, count in product(("block", "uniform"), range(1, layers + 1)):
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        yield dict(zip(names, ("full", method, count), strict=True))


def everything(request: Request, modules: tuple[str, ...], most: int) -> list[Candidate]:
    """All legal settings, each predicted by itself."""
    layers = max(len(s.layers) for s in check(request.config, request.world).split.stages)
    moves, tensors = subsets(MOVES), subsets(TENSORS)
    limits = (None, *range(1, most + 1))
    found, cache = [], {}  # type: ignore[var-annotated]
    for way, moved, also, limit in product(ways(modules, layers), moves, tensors, limits):
        offload = {"offload_modules": moved, "offload_tensors": also} if moved or also else {}
        switch = {"fine_grained_activation_offloading": bool(offload)}
        settings = {**way, **offload, **switch, "recompute_in_flight_limit": limit}
        config = request.config.with_values(**settings)
        try:
            layout = check(config, request.world)
        except ConfigError:
            continue
        found.append(evaluate(request, config, always=True, layout=layout, times_cache=cache))
    return found


def asked(recipe: str, world: int, cluster: Cluster, **settings: Any) -> Request:
    return Request(read_config(recipe, **settings), frozenset(), cluster, frozenset())


def agree(request: Request, all_found: list[Candidate]) -> None:
    """Compare the choice with the best of everything, for budgets from too small to ample."""
    peaks = sorted(c.memory.max_allocated for c in all_found)
    budgets = [peaks[0] - 1, *(peaks[int(q * (len(peaks) - 1))] + 1 for q in QUANTILES)]
    for budget in budgets:
        fit = fit_memory(replace(request, cluster=request.cluster.within(budget)))
        times = [c.seconds for c in all_found if c.memory.max_allocated <= budget]
        if not times:
            assert fit.best is None
            assert fit.smallest.memory.max_allocated == pytest.approx(peaks[0], rel=1e-12)
            continue
        assert fit.best is not None
        assert fit.best.memory.max_allocated <= budget
        assert fit.best.seconds == pytest.approx(min(times), rel=1e-12)


@pytest.mark.parametrize("bandwidth", [50e9, 1e9], ids=["copies hidden", "copies shown"])
@pytest.mark.parametrize(
    "recipe", ["debug", pytest.param("debug-mixtral", marks=pytest.mark.exhaustive)]
)
def test_the_choice_is_the_fastest_of_everything(recipe: str, bandwidth: float) -> None:
    cluster = replace(load_cluster("H100", 4), host_bandwidth=bandwidth)
    settings = SMALL | {"pipeline_model_parallel_size": 4, "num_layers": 8}
    request = asked(recipe, 4, cluster, **settings)
    agree(request, everything(request, DENSE if recipe == "debug" else EXPERTS, 3))


def test_given_settings_stay() -> None:
    cluster = load_cluster("H100", 2).within(1e12)
    request = asked("debug", 2, cluster, **SMALL, recompute_granularity="full")
    kept = fit_memory(replace(request, given=frozenset({"recompute_granularity"}))).best
    free = fit_memory(request).best
    assert kept is not None and kept.layout.config.memory.recompute_granularity == "full"
    assert free is not None and free.layout.config.memory.recompute_granularity is None


LINE = "train debug --nproc 2 --pp 2 --gbs 6 --seq-length 2048 --max-position-embeddings 2048"


@pytest.mark.parametrize("share", [0.8, 2.0])
@pytest.mark.parametrize("written", ["", 'recompute_granularity = "full"\n'])
def test_the_flags_of_a_choice_choose_the_same(
    share: float, written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"seq_length": 2048, "max_position_embeddings": 2048, "global_batch_size": 6}
    config = read_config("debug", **settings, pipeline_model_parallel_size=2)
    request = Request(config, frozenset(), load_cluster("H100", 2), frozenset())
    plain = fit_memory(request).plain.memory.max_allocated
    recipe = tmp_path / "recipe.toml"
    text = to_toml(config, changes_only=True)
    assert "[memory]" not in text
    recipe.write_text(f"{text}\n[memory]\n{written}")
    line = f"train {recipe} --nproc 2 --dry-run"
    assert main(shlex.split(f"{line} --memory-budget {int(share * plain)}")) == 0
    by_budget = capsys.readouterr()
    typed = by_budget.err.partition("the same as ")[2].partition("\n")[0]
    assert typed.startswith("--") or (not written and share > 1)
    assert main(shlex.split(f"{line} {typed if typed.startswith('--') else ''}")) == 0
    assert capsys.readouterr().out == by_budget.out


def test_what_never_fits_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{LINE} --dry-run --memory-budget 1MB")) != 0
    works = capsys.readouterr().err.partition("works: ")[2].strip()
    assert works.startswith("--memory-budget ")
    assert main(shlex.split(f"{LINE} --dry-run {works}")) == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("70GiB", 70 * 2**30), ("1.5 GB", 1.5e9), ("2e9", 2e9), ("512M", 512e6), ("9B", 9)],
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "GiB", "5X", "nan", "1e30", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert read_bytes(text) is None
