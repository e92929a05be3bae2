from pathlib import Path

from fivefold.cli.train import Options
from fivefold.config.config import SECTION_SETTINGS
from fivefold.config.megatron_job.release import known
from fivefold.config.reference import is_topic, reference_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "flags.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == reference_page(), "run: python -m fivefold.docs"


def test_the_page_has_a_row_for_every_setting() -> None:
    page = reference_page()
    for section, settings in SECTION_SETTINGS.items():
        assert f"## [{section}]" in page
        assert all(f"| `{setting.name}` |" in page for setting in settings)


def test_each_flag_of_megatron_lm_is_told_of() -> None:
    topics = [flag.lstrip("-") for flag in known().flags]
    assert not [topic for topic in topics if not is_topic(topic, Options)]
