"""`plan --guide`: every row can be reached, and what it costs is a layout within it."""

from dataclasses import replace

import pytest

from fivefold.config.config import SETTINGS, Config
from fivefold.config.presets import PRESETS
from fivefold.predict.cluster import preset
from fivefold.search.request import request
from fivefold.search.search import legal_space
from fivefold.tell.guide import TABLES, Facts, advice, as_json, follows, guide
from tests.search.test_search import EXPERTS, SMALL, asked, result_of


def test_every_row_is_for_somebody_and_no_two_for_the_same() -> None:
    reached = set()
    for model in PRESETS.values():
        for gpus, network, length in ((8, 50e9, 1024), (64, 50e9, 1024), (16, 3e9, 32768)):
            link = replace(preset("H100", 8).network_link, bandwidth=network)
            cluster = replace(preset("H100", gpus), network_link=link)
            model = replace(model, max_position_embeddings=32768)
            config = Config(model).with_values(seq_length=length)
            facts = Facts.of(request(config, cluster, by_flag=("seq_length",)))
            for table in TABLES:
                rows = [row.case for row in table.rows if row.holds(facts)]
                assert len(rows) <= 1, (table.by, rows)
                reached |= {(table.by, case) for case in rows}
    assert reached == {(table.by, row.case) for table in TABLES for row in table.rows}


def test_rows_allow_values_of_settings() -> None:
    facts = Facts(1e9, False, False, 1024, 1, 50e9, 8, 4)
    for only in (only for table in TABLES for row in table.rows for only in row.only(facts)):
        assert only.keys() <= SETTINGS.keys()
        assert all(only.values())


def test_a_row_may_name_sizes_in_order() -> None:
    """Ulysses is no wider than the node leaves room for, nor than the key/value heads."""
    rows = {row.case: row for table in TABLES for row in table.rows}
    facts = Facts(8e9, False, False, 65536, 2, 50e9, 8, 2)
    sizes = ("tensor_model_parallel_size", "context_parallel_size")
    tries = rows["dense, over 8 K tokens"].only(facts)
    assert [tuple(next(iter(only[name])) for name in sizes) for only in tries] == [
        *((1, 2), (2, 2), (4, 2), (8, 1))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        SMALL,
        *(
            pytest.param(line, marks=pytest.mark.exhaustive)
            for line in (EXPERTS, "llama2-13b --cluster A100 --gpus 16 --gbs 64")
        ),
    ],
)
def test_what_a_row_costs_is_the_best_within_it(line: str) -> None:
    result = result_of(line)
    found, facts = advice(result), Facts.of(result.request)
    assert [each.table for each in found] == list(TABLES)
    for each in found:
        if each.best is not None:
            assert each.row is not None
            assert any(follows(each.best, only) for only in each.row.only(facts))
            assert each.best.memory.fits
            assert each.best.seconds >= result.fastest * 0.99
            assert each.follows == (each.best is result.best)
    text = "\n".join(guide(result, found))
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("by ") >= len(TABLES)
    assert [told["by"] for told in as_json(found)] == [table.by for table in TABLES]


def test_recomputation_that_a_row_asks_for_is_there() -> None:
    only = {"recompute_granularity": frozenset({"full"})}
    space = legal_space(asked(SMALL).among(only))
    chosen = {space.memory[number].is_full for number in set(space.columns["memory"].tolist())}
    assert chosen == {True}
