from math import inf

import pytest

from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.pipeline.draw.figures import comparison, comparison_json, figures, report
from fivefold.pipeline.draw.study import AUTO, Study, compare, run_schedule
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.pipeline.split.balance_study import cut_figures, cut_lines, cut_model

EIGHT = Study(8, 24)


@pytest.mark.parametrize(
    ("name", "makespan"),
    [
        ("gpipe", 93),
        ("1f1b", 93),
        ("interleaved_1f1b", 82.5),
        ("zb_h1", 79),
        ("zb_v", 75.5),
        ("interleaved_zb", 75.5),
        ("v_half", 80.5),
        ("v_min", 85.5),
    ],
)
def test_published_makespans(name, makespan):
    """F = B = W = 1 a rank, P = 8, M = 24."""
    result = run_schedule(EIGHT, name)
    assert figures(result)["flush_makespan"] == makespan
    assert result.bound <= makespan


def test_flush_and_span_are_told_apart():
    """A bubble of 0.29 % in the span is one of 10 % in a step that ends with a norm."""
    times = (29.718, 29.444, 19.927)
    told = figures(run_schedule(Study(8, 24, times, 0.527), "zb_h2"))
    assert told["span_bubble"] == pytest.approx(0.0698, abs=5e-5)
    assert told["flush_bubble"] > 0.1
    assert told["flush_makespan"] > told["span"] > told["work"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCHEDULES, AUTO])
def test_no_schedule_beats_its_bound(name):
    studies = Study(4, 8, (1, 1.3, 0.7), 0.2), Study(3, 7, (1, 0.5, 2))
    for study in studies[name == AUTO :]:  # a search takes its time
        try:
            result = run_schedule(study, name)
        except ConfigError:
            continue  # an odd number of ranks or microbatches
        for makespan in (result.chart.simulation.makespan, result.dx_first):
            assert makespan >= result.bound * (1 - 1e-9)
        early = run_schedule(study, name, dx_first=True)
        assert early.chart.simulation.makespan == pytest.approx(result.dx_first)


def test_slices_shorten_the_fill_and_their_bound():
    whole, cut = (run_schedule(Study(4, 8, num_slices=k), "sliced_1f1b") for k in (1, 4))
    assert cut.chart.simulation.makespan < whole.chart.simulation.makespan
    assert cut.bound == 24 + 3 / 4


def test_auto_keeps_to_the_cap_and_beats_what_keeps_to_it():
    study = Study(4, 16, (1, 1.15, 0.85), 0.05, cap=2)
    results = dict(compare(study))
    best = results[AUTO].chart
    assert max(best.peaks) <= 2 + 1e-9
    assert isinstance(results["1f1b"], ConfigError)
    assert "1f1b holds 4 microbatches, the cap is 2" in str(results["1f1b"])
    others = [r for name, r in results.items() if name != AUTO and not isinstance(r, ConfigError)]
    assert all(best.simulation.makespan <= r.chart.simulation.makespan + 1e-9 for r in others)


def test_the_comparison_names_every_schedule_and_why_it_cannot():
    results = list(compare(Study(3, 4)))
    lines = comparison(results)
    assert [line.split()[0] for line in lines[1:]] == [*SCHEDULES, AUTO]
    text = "\n".join(lines)
    assert "cannot: dualpipe needs an even number of pipeline ranks, not 3" in text
    assert "cannot: dualpipe_v over 3 ranks needs at least 6 microbatches, not 4" in text
    assert text.count("*") >= 1
    told = comparison_json(results)
    assert ["error" in entry for entry in told] == [
        isinstance(result, ConfigError) for _, result in results
    ]


def test_slices_are_never_dropped_in_silence():
    with pytest.raises(ConfigError, match="cannot cut a sequence"):
        run_schedule(Study(4, 8, num_slices=2), "1f1b")
    with pytest.raises(ConfigError, match="of whole sequences, not of 2 slices"):
        run_schedule(Study(4, 8, num_slices=2), AUTO)


def test_the_report_says_what_dx_first_would_give():
    rows = {name: value for name, value, _ in report(run_schedule(EIGHT, "1f1b"))}
    assert rows["flush makespan"] == "93" and rows["dX first"] == "86"
    assert rows["lower bound"] == "79" and rows["peak in flight"] == "8"
    assert "dX first" not in {name for name, _, _ in report(run_schedule(EIGHT, "zb_v"))}


def test_a_model_gives_its_stages_to_the_schedule():
    study = Study(4, 8, num_chunks=2)
    cut = cut_model(PRESETS["llama3-8b"], study, schedule="zb_v")
    assert cut.balance.split.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert sum(stage.f for stage in cut.stages) == pytest.approx(4)  # 1 a rank on average
    told = cut_figures(cut)
    assert sum(told["layers"]) == 32 and told["largest_over_mean"] < 1.1
    text = "\n".join(cut_lines(cut))
    assert f"layout {cut.layout}" in text and "= 32" in text


def test_stated_costs_and_a_layout():
    study = Study(16, 32, num_chunks=2)
    costs = {"dense": 0.55, "mtp": 1.8, "head": 0.7}
    cut = cut_model(PRESETS["deepseek-v3"], study, layout="Et|(tt|)*30mL", costs=costs)
    assert cut.balance.unevenness == pytest.approx(1.15849, abs=1e-5)
    assert cut.stages[0].f == 0.55


@pytest.mark.parametrize("microbatches", [2, 8])
@pytest.mark.parametrize("schedule", [None, AUTO])
@pytest.mark.parametrize("layout", ["loop:", "v:"])
@pytest.mark.parametrize("stages", ["Et|ttt|||||L|", "Et|t|t|tL", "E|t||||t|||t|tL||"])
def test_any_layout_can_be_weighed(
    layout: str, stages: str, schedule: str | None, microbatches: int
):
    """Without a schedule, or for a searched one, which fit every placement."""
    study = Study(4, microbatches)
    model, text = PRESETS["debug-llama"], layout + stages
    found = cut_model(model, study, schedule=schedule, layout=text)
    assert len(found.balance.split.stages) == stages.count("|") + 1


def test_memory_moves_layers_or_is_refused():
    model, study = PRESETS["llama3-8b"], Study(4, 16)
    loose = cut_model(model, study, memory=inf)
    tight = cut_model(model, study, memory=0.97 * max(loose.needs))
    assert max(tight.needs) <= 0.97 * max(loose.needs)
    assert tight.layout != loose.layout
    with pytest.raises(ConfigError, match="no cut of the model fits"):
        cut_model(model, study, memory=0.5 * max(loose.needs))
    with pytest.raises(ConfigError, match="one copy of a model"):
        cut_model(model, study, schedule="dualpipe")
