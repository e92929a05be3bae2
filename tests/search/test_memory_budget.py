"""What a budget makes a layout recompute and offload is the fastest of all that fits."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.sources import read_config, to_toml
from fivefold.errors import ConfigError
from fivefold.predict.cluster import Cluster
from fivefold.predict.cluster_file import load_cluster
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.memory_budget import LIMIT, MOVED, fit_memory
from fivefold.search.request import Request
from fivefold.units import read_bytes
from tests.verify.cases import chosen

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
    for named in subsets(modules):
        kind = "selective" if named else None
        values = {"recompute_modules": named} if named else {}
        yield {"recompute_granularity": kind, **values}
    for method, count in product(("block", "uniform"), range(1, layers + 1)):
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        yield dict(zip(names, ("full", method, (count,)), strict=True))


def everything(
    request: Request, modules: tuple[str, ...], most: int, *, moved: bool = True
) -> list[Candidate]:
    """All legal settings that are the same for every stage, each predicted by itself."""
    layers = max(len(s.layers) for s in check(request.config, request.world).split.stages)
    moves, tensors = (subsets(MOVES), subsets(TENSORS)) if moved else ([()], [()])
    limits = (None, *range(1, most + 1))
    found, cache = [], {}  # type: ignore[var-annotated]
    for way, items, also, limit in product(ways(modules, layers), moves, tensors, limits):
        offload = {"offload_modules": items, "offload_tensors": also} if items or also else {}
        switch = {"fine_grained_activation_offloading": bool(offload)}
        settings = {**way, **offload, **switch, "recompute_in_flight_limit": limit}
        config = request.config.with_values(**settings)
        try:
            layout = check(config, request.world)
        except ConfigError:
            continue
        found.append(evaluate(request, layout, always=True, times_cache=cache))
    return found


def asked(recipe: str, world: int, cluster: Cluster, **settings: Any) -> Request:
    return Request(read_config(recipe, **settings), frozenset(), cluster, frozenset())


def by_stage(request: Request, modules: tuple[str, ...]) -> list[Candidate]:
    """Each kind of recomputation in every number of the layers of each stage."""
    stages = check(request.config, request.world).split.stages
    most = [len(stage.layers) or int(stage.mtp > 0) for stage in stages]
    found, cache = [], {}  # type: ignore[var-annotated]
    for named, numbers in product(subsets(modules), product(*(range(n + 1) for n in most))):
        settings = {
            "recompute_granularity": "selective" if named else "full",
            "recompute_method": "block",
            "recompute_num_layers": numbers,
            "recompute_modules": named or ("core_attn",),
        }
        config = request.config.with_values(**settings)
        try:
            layout = check(config, request.world)
        except ConfigError:
            continue
        found.append(evaluate(request, layout, always=True, times_cache=cache))
    return found


def agree(
    request: Request,
    all_found: list[Candidate],
    *,
    whole: bool = True,
    quantiles: Sequence[float] = QUANTILES,
) -> None:
    """Compare the choice with the best of everything, for budgets from too small to ample.

    Args:
        request: whose memory settings are chosen.
        all_found: legal settings.
        whole: whether these are all of them; else there may be faster ones that differ by stage, or
            offload other modules.
        quantiles: of their peaks, which become budgets.
    """
    peaks = sorted(c.memory.max_allocated for c in all_found)
    budgets = [peaks[0] - 1, *(peaks[int(q * (len(peaks) - 1))] + 1 for q in quantiles)]
    for budget in budgets:
        fit = fit_memory(replace(request, cluster=request.cluster.within(budget)))
        times = [c.seconds for c in all_found if c.memory.max_allocated <= budget]
        if not times:
            assert fit.best is None
            assert fit.smallest.memory.max_allocated == pytest.approx(peaks[0], rel=1e-12)
            continue
        assert fit.best is not None
        assert fit.best.memory.max_allocated <= budget
        memory = fit.best.layout.config.memory
        tried = {*memory.offload_modules} <= {*MOVES} and not memory.recomputes_first_layers
        if whole or tried:
            assert fit.best.seconds == pytest.approx(min(times), rel=1e-12)
        assert fit.best.seconds <= min(times) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("recipe", "ranks", "bandwidth", "quantiles"),
    [
        pytest.param("debug", 2, 1e9, (0.0, 0.1, 0.35, 0.7), id="copies shown"),
        *(
            pytest.param(recipe, 3, bandwidth, QUANTILES, marks=pytest.mark.exhaustive)
            for recipe, bandwidth in product(("debug", "debug-mixtral"), (1e9, 50e9))
        ),
    ],
)
def test_the_choice_is_the_fastest_of_everything(
    recipe: str, ranks: int, bandwidth: float, quantiles: Sequence[float]
) -> None:
    cluster = replace(load_cluster("H100", ranks), host_bandwidth=bandwidth)
    settings = SMALL | {"pipeline_model_parallel_size": ranks, "num_layers": 2 * ranks}
    request = asked(recipe, ranks, cluster, **settings)
    modules = DENSE if recipe == "debug" else EXPERTS
    agree(request, everything(request, modules, 2), whole=False, quantiles=quantiles)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stage on each of three ranks": ("debug", {"pipeline_model_parallel_size": 3}),
    "two stages on each of two ranks": (
        "debug",
        {"num_layers": 5, "pipeline_model_parallel_layout": "Ett|t|t|tL"},
    ),
    "two copies of the model": ("debug", {"pipeline_schedule": "dualpipe"}),
    "uneven stages, MTP": (
        "debug",
        {
            "pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": "Ettt|tt||tmL",
            "mtp_num_layers": 1,
        },
    ),
    "one stage": ("debug", {"pipeline_model_parallel_size": 1}),
    "experts": ("debug-mixtral", {}),
}


@pytest.mark.parametrize("name", chosen(LAYOUTS, "two stages on each of two ranks"))
def test_the_numbers_of_layers_by_stage_are_the_fastest_of_all(name: str) -> None:
    recipe, changed = LAYOUTS[name]
    settings = SMALL | {"num_layers": 6, "global_batch_size": 8} | changed
    ranks = settings["pipeline_model_parallel_size"]
    request = asked(recipe, ranks, load_cluster("H100", ranks), **settings)
    modules = DENSE if recipe == "debug" else EXPERTS
    found = [*everything(request, modules, 0, moved=False), *by_stage(request, modules)]
    assert any(c.memory.max_allocated < 0.9 * found[0].memory.max_allocated for c in found)
    request = replace(request, given=frozenset({LIMIT, *MOVED}))
    agree(request, found, quantiles=(0.05, 0.2, 0.5, 0.9))


def test_given_settings_stay() -> None:
    cluster = load_cluster("H100", 2).within(1e12)
    request = asked("debug", 2, cluster, **SMALL, recompute_granularity="full")
    kept = fit_memory(replace(request, given=frozenset({"recompute_granularity"}))).best
    free = fit_memory(request).best
    assert kept is not None and kept.layout.config.memory.recompute_granularity == "full"
    assert free is not None and free.layout.config.memory.recompute_granularity != "full"


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
