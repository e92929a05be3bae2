import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from fivefold.pipeline.draw.html import to_html
from fivefold.pipeline.draw.study import Study, run_schedule
from fivefold.pipeline.draw.svg import to_svg
from fivefold.pipeline.draw.text import picture
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.pipeline.simulate import Reason

COLOUR = re.compile(r"\033\[[0-9;]*m")


def chart(name, ranks=4, total=8, **options):
    return run_schedule(Study(ranks, total, **options), name).chart


def test_a_picture_that_fits_has_a_clock():
    assert picture(chart("1f1b", 2, 2), 80, colours=False) == [
        "time   0              5",
        "rank 0 F0-F1-......B0----...B1----",
        "rank 1 ...F0-B0----F1-B1----......",
    ]


@pytest.mark.parametrize("width", [60, 100, 160])
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe_v"])
def test_no_line_is_wider_than_asked_and_all_time_is_shown(name, width):
    shown = chart(name)
    lines = picture(shown, width, colours=False)
    assert max(map(len, lines)) <= width
    rank = [line.removeprefix("rank 2 ") for line in lines if line.startswith("rank 2 ")]
    row = "".join(rank)
    busy = sum(timed.end - timed.start for timed in shown.simulation.timeline[2])
    share = sum(char != "." for char in row) / len(row)
    assert share == pytest.approx(busy / shown.simulation.makespan, abs=0.03)
    for label in ("F0", "B7"):
        assert label in row or len(rank) == 1  # a picture in one panel may be without names


def test_eight_ranks_and_24_microbatches_are_readable():
    """The published way to show a pipeline: every act is named, in a terminal of usual width."""
    lines = picture(chart("1f1b", 8, 24), 120, colours=False)
    text = "".join(line.removeprefix("rank 0 ") for line in lines if line.startswith("rank 0 "))
    assert re.findall(r"F\d+", text) == [f"F{mb}" for mb in range(24)]
    assert len(lines) < 50


def test_a_long_program_is_shown_in_one_panel_of_kinds():
    lines = picture(chart("zb_v", 8, 100), 100, colours=False)
    assert len(lines) == 9
    assert set("".join(line[7:] for line in lines[1:])) == set("FBW.")


def test_colours_change_nothing_but_the_labels():
    shown = chart("zb_v", 2, 4)
    plain, coloured = (picture(shown, 200, colours=c) for c in (False, True))
    stripped = [COLOUR.sub("", line) for line in coloured]
    assert len(stripped) == len(plain)
    assert stripped[1].split()[2:5] == ["0a", "1a", "2a"]
    assert "\033[48;5;25;38;5;231m0a" in coloured[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_box_for_every_act(name):
    shown = chart(name)
    root = ET.fromstring(to_svg([shown]))
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    acts = [kid for acts in shown.program.ranks for act in acts for kid in act.elementary]
    assert len(titles) == len(acts)
    assert {title.partition(":")[0] for title in titles} == {str(act) for act in acts}
    width = float(root.attrib["width"])
    boxes = root.iter("{http://www.w3.org/2000/svg}rect")
    ends = [float(b.attrib["x"]) + float(b.attrib["width"]) for b in boxes if "x" in b.attrib]
    assert max(ends) <= width


def test_one_scale_for_several_charts():
    short, long = chart("zb_v", 4, 8), chart("gpipe", 4, 16)
    root = ET.fromstring(to_svg([short, long]))
    rows = [b for b in root.iter("{http://www.w3.org/2000/svg}rect") if b.get("class") == "h"]
    widths = [float(row.attrib["width"]) for row in rows]
    ratio = long.simulation.makespan / short.simulation.makespan
    assert widths[-1] / widths[0] == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("name", SCHEDULES)
def test_words_end_inside_the_picture(name):
    """By the widest that characters of this size are, whatever the font."""
    root = ET.fromstring(to_svg([chart(name, 2, 4)]))
    texts = [e for e in root.iter("{http://www.w3.org/2000/svg}text") if e.get("class") != "d"]
    ends = [float(text.attrib["x"]) + 6.2 * len(text.text) for text in texts]
    assert max(ends) <= float(root.attrib["width"])


def test_pages_and_pictures_follow_the_viewers_background():
    for text in (to_svg([chart("1f1b")]), to_html([chart("1f1b")])):
        assert "prefers-color-scheme" in text
        assert 'fill="#fff"' not in text
    assert 'name="viewport" content="width=device-width' in to_html([chart("1f1b")])


def page_data(page):
    return json.loads(re.search(r"const DATA = (.*);\n", page)[1])


def test_the_page_stands_alone_and_says_all():
    shown = chart("zb_v", hop=0.1)
    page = to_html([shown, chart("dualpipe")])
    assert not re.search(r"(src|href)=|https?://|@import", page)
    first, second = page_data(page)["charts"]
    assert first["title"] == "zb_v" and second["title"] == "dualpipe"
    for row, timeline, acts in zip(
        first["rows"], shown.simulation.timeline, shown.program.ranks, strict=True
    ):
        assert [act["what"] for act in row["acts"]] == [str(act) for act in acts]
        assert row["acts"][0]["start"] == pytest.approx(timeline[0].start)
        times = [item["end"] - item["start"] for item in row["acts"] + row["gaps"]]
        assert sum(times) == pytest.approx(first["makespan"], rel=1e-5)
        assert row["memory"][-1][1] == pytest.approx(0, abs=1e-9)
    reasons = {gap["reason"] for row in first["rows"] for gap in row["gaps"]}
    assert reasons == {"fill", "drain", "late upstream", "message in flight"}
    assert set(page_data(page)["gaps"]) == {str(reason) for reason in Reason}
    assert any(act["critical"] for row in first["rows"] for act in row["acts"])


def test_a_title_cannot_end_the_script():
    page = to_html([replace(chart("1f1b", 2, 2), title="</script>")])
    assert page.count("</script>") == 1
    assert page_data(page)["charts"][0]["title"] == "</script>"


def test_the_script_is_read_by_node(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    script = re.search(r"<script>(.*)</script>", to_html([chart("1f1b")]), re.DOTALL)[1]
    file = tmp_path / "timeline.js"
    file.write_text(script)
    subprocess.run([node, "--check", str(file)], check=True, timeout=60)
