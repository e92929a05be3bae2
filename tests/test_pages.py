"""The figures that pages quote are those that their commands give (`make docs`)."""

from collections import Counter

import pytest

from benchmarks import pages

QUICK = [name for name, figures in pages.FIGURES.items() if figures.seconds <= 2]


def test_every_block_is_made_by_a_command_and_stands_once() -> None:
    stands = Counter(name for _, name, _ in pages.blocks())
    assert stands == Counter(list(pages.FIGURES))


@pytest.mark.parametrize("name", QUICK)
def test_figures_are_up_to_date(name: str) -> None:
    assert pages.main([name, "--check"]) == 0


def test_a_changed_figure_is_noticed_and_mended(monkeypatch, tmp_path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- figures: host time -->\n| old |\n<!-- end -->\nafter\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.main(["--check"]) == 1 and "| old |" in page.read_text()
    assert pages.main([]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- figures") and text.endswith("<!-- end -->\nafter\n")
    assert "| old |" not in text and "(benchmarks/results/host-" in text
    assert pages.main(["--check"]) == 0
