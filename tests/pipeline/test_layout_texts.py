"""Layout texts: what Megatron-LM accepts means the same here; what is ours beyond cannot collide.

`python -m benchmarks.check_layouts --record` has Megatron-LM's own parser read the recorded texts.
"""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigError
from fivefold.files import read_json
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.pipeline.split.layout_language import parse
from fivefold.pipeline.split.stages import layout_string


class Record(msgspec.Struct):
    """Layout texts, and what Megatron-LM makes of them: None where it refuses one."""

    release: str
    meanings: dict[str, str | None]


RECORD = read_json(Path(__file__).parent / "megatron_layouts.json", Record)
GRAMMAR = st.text(alphabet="Etm|L*(),0123", max_size=20) | st.from_regex(
    r"E?((t|\(t*\|\)|\(t+\)|\|)(\*[0-3],?[0-3]?)?){0,6}m?L?", fullmatch=True
)


def meaning(text: str) -> str | None:
    """The text with its repeats written out; None if it is refused."""
    try:
        return "".join(symbol.char for symbol in parse(text).symbols)
    except ConfigError:
        return None


@pytest.mark.parametrize("accepted", [True, False])
def test_what_megatron_accepts_means_the_same_here(accepted: bool) -> None:
    texts = {t: m for t, m in RECORD.meanings.items() if (m is not None) is accepted}
    assert len(texts) > 200
    if accepted:
        assert {text: meaning(text) for text in texts} == texts
    else:  # what is ours beyond it: parentheses in or without, a repeat of a repeat, white space
        ours = {text for text in texts if meaning(text) is not None}
        assert all(re.search(r"[(\s]|\*\d+,*\d*\*", text) for text in ours)
        assert 0 < len(ours) < len(texts)


@given(GRAMMAR, st.lists(st.tuples(st.integers(0, 20), st.sampled_from(" \t\n,"))))
def test_space_and_commas_do_not_change_what_a_text_means(
    text: str, gaps: list[tuple[int, str]]
) -> None:
    spaced = text
    for at, gap in gaps:
        before, after = spaced[:at], spaced[at:]
        # Not where a gap would tear a number, nor where it would itself be repeated (`t *0`).
        if not re.search(r"[0-9*]\s*,*$", before) and not re.match(r"[\s,]*[*0-9]", after):
            spaced = before + gap + after
    assert meaning(spaced) == meaning(text)


@given(GRAMMAR, st.sampled_from(["loop:", "v:", " loop : "]))
def test_a_prefix_chooses_the_placement_alone(text: str, prefix: str) -> None:
    assert meaning(prefix + text) == meaning(text)


@given(GRAMMAR)
def test_what_is_written_out_means_itself(text: str) -> None:
    found = meaning(text)
    assert found is None or meaning(found) == found


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any), st.integers(0, 2))
def test_stages_are_written_as_megatron_reads_them(sizes: list[int], mtp: int) -> None:
    """No parenthesis in another, no repeat of a repeat, no space, no prefix: nothing of ours."""
    text = "E" + "|".join("t" * n for n in sizes) + "m" * mtp + "L"
    split = SplitSettings(sum(sizes), 1, layout=text, mtp_num_layers=mtp).split()
    written = layout_string(split.stages)
    assert re.fullmatch(r"([EtmL|]|[tm]\*\d+|\(([Etm|]|[tm]\*\d+)+\)\*\d+(?!\*))+", written)
    assert meaning(written) == text


def test_a_group_within_a_text_of_ours_is_not_repeated_twice() -> None:
    """Alone it means the last symbol to Megatron-LM, so inside it may not mean the whole."""
    assert meaning("E(tt|)*2*3L") == "Ett|tt|||L"
    assert meaning("E(t t|)*2*3 L") == "Ett|tt|||L"
    assert meaning("E((tt|)*2*3)*1L") is None
    assert meaning("E((tt|)*2)*3L") == "E" + "tt|" * 6 + "L"
