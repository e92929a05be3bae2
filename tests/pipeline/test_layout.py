import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigError
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.pipeline.split.layout_language import parse
from fivefold.pipeline.split.stages import StageSpec, layout_string, stage_table


def counts(split):
    return [len(stage.layers) for stage in split.stages]


@pytest.mark.parametrize(
    ("layout", "layers", "mtp", "pp", "expected"),
    [
        ("E|t|t*2|t||(t|)*2,t*2,L", 8, 0, 4, [0, 1, 2, 1, 0, 1, 1, 2]),
        ("Et*2|(tt|)*29,t|mL", 61, 1, 1, [2, *[2] * 29, 1, 0]),
        ("E|t*3|(t|)*3tt|m|L", 8, 1, 8, [0, 3, 1, 1, 1, 2, 0, 0]),
        ("Et|(tt|)*30mL", 61, 1, 16, [1, *[2] * 30, 0]),
        ("Et*3|(tt|)*29,m|L", 61, 1, 16, [3, *[2] * 29, 0, 0]),
        ("E ((t | t)*2 |)*2\n t*2*3 L", 14, 0, 1, [1, 2, 1, 1, 2, 1, 6]),
        ("E t|*3 t L", 2, 0, 2, [1, 0, 0, 1]),
        ("|Et|tL||", 2, 0, 5, [0, 1, 1, 0, 0]),
    ],
)
def test_layouts_parse(layout, layers, mtp, pp, expected):
    split = SplitSettings(layers, pp, layout=layout, mtp_num_layers=mtp).split()
    assert counts(split) == expected
    assert sum(stage.mtp for stage in split.stages) == mtp
    assert [stage.embedding for stage in split.stages].index(True) == 0
    assert split.stages[-1].head


def test_layout_says_what_each_stage_holds():
    split = SplitSettings(3, 2, layout="Et||tt|mL", mtp_num_layers=1).split()
    assert split.stages == (
        StageSpec(True, (0,), False),
        StageSpec(False, (), False),
        StageSpec(False, (1, 2), False),
        StageSpec(False, (), True, mtp=1),
    )


def test_prefix_places_stages():
    assert SplitSettings(4, 2, layout="loop: Et|t|t|tL").split().placement == (0, 1, 0, 1)
    split = SplitSettings(4, 2, layout="v:Et|t|t|tL").split()
    assert split.placement == (0, 1, 1, 0)
    assert split.stages_of(0) == (0, 3)
    assert (split.num_ranks, split.num_virtual) == (2, 2)


@pytest.mark.parametrize(
    ("layout", "message", "column"),
    [
        ("E|tx|t*2L", "unexpected 'x'", 3),
        ("E((t|)*2L", "never closed", 1),
        ("Et)L", "never opened", 2),
        ("*2EttL", "nothing to repeat", 0),
        ("E(*2t)L", "nothing to repeat", 2),
        ("Et*L", "after * comes a number", 2),
        ("E(t|t*)L", "after * comes a number", 5),
        ("E((t|)*2*3)L", "a second * after a parenthesis", 8),
        ("Et*2 2L", "unexpected '2'", 5),
        ("E((t*9999)*9999)L", "more than 100000", 10),
        ("Et*99999999999999999999L", "more than 100000", 2),
        ("w:EttL", "unknown placement 'w'", 0),
        ("t|EtL", "E (embedding) stands once, as the first", 2),
        ("Et|EtL", "E (embedding) stands once, as the first", 3),
        ("Et|tLt", "L (head and loss) stands once, as the last", 4),
        ("ttL", "E (embedding) is missing", 0),
        ("Et|t", "L (head and loss) is missing", 4),
        ("E\ttxL", "unexpected 'x'", 3),
    ],
)
def test_mistakes_point_at_the_column(layout, message, column):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        SplitSettings(2, 1, layout=layout).split()
    mistake = next(m for m in caught.value.mistakes if message in m.what)
    text, caret = mistake.why
    assert caret == " " * column + "^"
    assert text == layout.replace("\t", " ")


def test_rules_of_the_model_are_all_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        SplitSettings(8, 4, layout="t|E|mt|mE*2|").split()
    text = str(caught.value)
    for reason in (
        "2 t, but num_layers is 8",
        "2 m, but mtp_num_layers is 0",
        "t cannot follow a prediction layer m",
        "all m belong in one stage",
        "5 stages cannot be laid over 4 pipeline ranks",
        "5 % 4 = 1",
        "4 stages | 8 stages",
    ):
        assert reason in text


@given(st.text(alphabet="EtmL|*()23, v:", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        parsed = parse(text)
    except ConfigError:
        return
    assert all(text[symbol.column] == symbol.char for symbol in parsed.symbols)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    st.integers(0, 2),
)
def test_layout_string_is_read_back(sizes, mtp):
    text = "E" + "|".join("t" * n for n in sizes) + "m" * mtp + "L"
    split = SplitSettings(sum(sizes), 1, layout=text, mtp_num_layers=mtp).split()
    again = SplitSettings(
        sum(sizes), 1, layout=layout_string(split.stages), mtp_num_layers=mtp
    ).split()
    assert again == split
    assert [layer for stage in split.stages for layer in stage.layers] == list(range(sum(sizes)))


@given(
    st.integers(1, 96),
    st.integers(1, 8),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_even_splits_conserve_layers_or_say_why_not(layers, pp, virtual, embedding, loss):
    settings = {"account_for_embedding": embedding, "account_for_loss": loss}
    total = layers + embedding + loss
    if total % (pp * virtual):
        with pytest.raises(ConfigError, match=f"= {total % (pp * virtual)}"):
            SplitSettings(layers, pp, virtual=virtual, **settings).split()
        return
    split = SplitSettings(layers, pp, virtual=virtual, **settings).split()
    assert [layer for stage in split.stages for layer in stage.layers] == list(range(layers))
    assert split.placement == tuple(i % pp for i in range(pp * virtual))
    weights = counts(split)
    weights[0] += embedding
    weights[-1] += loss
    assert set(weights) == {total // (pp * virtual)}


def test_suggested_choices_work():
    with pytest.raises(ConfigError) as caught:
        SplitSettings(30, 4, virtual=2).split()
    mistake = caught.value.mistakes[0]
    assert "30 % (4 x 2) = 6" in mistake.why[0]
    assert mistake.works == (
        "--num-layers 24",
        "--num-layers 32",
        "--pipeline-model-parallel-size 3",
        "--pipeline-model-parallel-size 5",
    )
    layout = mistake.attempt.split("'")[1]
    assert counts(SplitSettings(30, 4, layout=layout).split()) == [4, 4, 4, 4, 4, 4, 3, 3]
    for pp in (3, 5):
        SplitSettings(30, pp, virtual=2).split()


def test_layers_per_virtual_stage_is_another_way_to_say_virtual():
    assert (
        SplitSettings(32, 4, layers_per_virtual_stage=4).split()
        == SplitSettings(32, 4, virtual=2).split()
    )
    with pytest.raises(ConfigError, match="4 pipeline ranks x 3 layers per stage"):
        SplitSettings(32, 4, layers_per_virtual_stage=3).split()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"first": 6, "last": 6}, [6, 9, 9, 6]),
        ({"first": 6}, [6, 8, 8, 8]),
        ({"last": 0}, [10, 10, 10, 0]),
        ({"first": 6, "last": 4, "virtual": 2}, [3, 5, 5, 2, 3, 5, 5, 2]),
    ],
)
def test_uneven_ends(settings, expected):
    split = SplitSettings(30, 4, **settings).split()
    assert counts(split) == expected
    assert [layer for stage in split.stages for layer in stage.layers] == list(range(30))


@pytest.mark.parametrize(
    ("arguments", "settings", "reason"),
    [
        ((30, 4), {"first": 7, "virtual": 2}, "7 layers on the first rank"),
        ((30, 4), {"first": 5, "last": 6}, "19 layers do not split evenly over the other 2 ranks"),
        ((30, 2), {"first": 20, "last": 20}, "30 - 20 - 20 = -10"),
        ((30, 2), {"first": 10, "last": 10}, "the ends hold 20 layers, the model has 30"),
        ((30, 1), {"first": 10}, "needs more than one pipeline rank"),
        ((30, 3), {"first": -1}, "at least 0, not -1"),
        ((0, 3), {}, "--num-layers must be at least 1"),
        ((30, 0), {}, "--pipeline-model-parallel-size must be at least 1"),
        ((32, 4), {"virtual": 2, "layers_per_virtual_stage": 4}, "exclude each other"),
        ((32, 4), {"virtual": 2, "layout": "EL"}, "the layout says it all"),
        ((32, 4), {"first": 8, "account_for_loss": True}, "both make uneven ends"),
        ((32, 4), {"first": 8, "layers_per_virtual_stage": 4}, "exclude each other"),
    ],
)
def test_settings_that_do_not_add_up(arguments, settings, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        SplitSettings(*arguments, **settings).split()


def test_prediction_layers_join_the_last_stage():
    split = SplitSettings(8, 4, mtp_num_layers=1).split()
    assert [stage.mtp for stage in split.stages] == [0, 0, 0, 1]


def test_stage_table():
    split = SplitSettings(7, 2, layout="v:E|t*3|*2t*4mL", mtp_num_layers=1).split()
    assert stage_table(split).splitlines() == [
        "        virtual 0  virtual 1",
        "rank 0  E          3-6 m L",
        "rank 1  0-2        -",
        "7 layers in 4 stages: 0+3+0+4 = 7",
    ]
