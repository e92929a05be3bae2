"""Whatever goes together computes what one device computes, and is rehearsed as theory has it."""

from random import Random

import pytest

from fivefold.check import check
from fivefold.errors import ConfigError
from fivefold.predict.cluster_file import load_cluster
from fivefold.rehearse.report import make_report
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.rehearse.run import rehearse_ranks
from tests.verify.any_settings import ALL, draw
from tests.verify.cases import STEPS, chosen, config, verify_in_pool

pytestmark = pytest.mark.slow

SEEDS = range(100)


@pytest.mark.parametrize("seed", chosen(SEEDS, 1, 2))
def test_what_goes_together_is_exact(seed: int) -> None:
    random = Random(seed)
    name, ranks = random.choice(sorted(ALL)), random.choice((1, 2, 2, 4, 4, 4, 8))
    settings = draw(random, lambda drawn: check(config(ALL[name], **drawn), ranks))
    shown = f"{name} on {ranks}: {settings}"
    try:
        report = verify_in_pool(ranks, config(ALL[name], **settings), steps=STEPS)
    except ConfigError as refused:  # of what rounds to 8 bits, in fp32
        assert "a last bit of fp32 decides" in str(refused), shown
        return
    assert report.passed, f"{shown}\n{report.text()}"


@pytest.mark.parametrize("seed", chosen(SEEDS, 7))
def test_what_goes_together_is_rehearsed(seed: int) -> None:
    """Ranks agree with each other, and what they send with theory."""
    random = Random(seed)
    name, ranks = random.choice(sorted(ALL)), random.choice((2, 4, 8))
    settings = draw(random, lambda drawn: check(config(ALL[name], **drawn), ranks))
    layout = rehearsed_layout(check(config(ALL[name], **settings), ranks))
    scripts = rehearse_ranks(layout, roles(layout))
    report = make_report(layout, "", scripts, load_cluster("H100", 16))
    assert report.passed, f"{name} on {ranks}: {settings}\n{report.text()}"
