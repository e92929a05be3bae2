"""Layouts whose messages go through the back end of ranks that share a GPU, on a CPU.

It writes at any time until it has been waited for, as on a GPU; a forgotten wait shows here, too.
"""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.mesh import collectives, shared_gpu
from fivefold.verify.compare import compare
from fivefold.verify.reference import load_trace
from fivefold.verify.report import VerifyReport
from fivefold.verify.run import verify
from tests.mesh.test_shared_gpu import RELAYED, Through, cpu_relay
from tests.verify.cases import (
    MIXTURE,
    MODELS,
    chosen,
    config,
    flags,
    named,
    shared_groups,
    verify_in_pool,
)

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[int, Config]] = {
    "tensor, pipeline": (4, config(MODELS["llama"], 4, **flags(tp=2, pp=2, sequence=True))),
    "ring, sharded": (
        4,
        config(MODELS["llama"], 4, **named(cp=2, strategy="optim_grads_params")),
    ),
    "experts": (2, config(MIXTURE, 2, **named(ep=2, dispatcher="flex"))),
}


def _on_rank(
    rank: int, world: int, layout: Layout, trace: Path, _: Path | None, plant: str | None
) -> VerifyReport | None:
    relay = cpu_relay()
    with ExitStack() as stack:
        stack.enter_context(patch.object(collectives, "exchanges_in_pairs", lambda x, group: False))
        stack.enter_context(shared_groups(RELAYED))
        stack.enter_context(Through(relay))
        if plant == "forget":
            at_once = shared_gpu._work(lambda timeout: True)
            stack.enter_context(patch.object(shared_gpu, "_work", lambda wait: at_once))
        return compare(layout, rank, torch.device("cpu"), load_trace(trace))


def test_what_needs_streams_is_refused_without() -> None:
    with pytest.raises(ConfigError) as refused:
        verify(check(CASES["experts"][1], 2), delays=1, races=True)
    assert [m.works for m in refused.value.mistakes] == [("--delays none",), ("--no-races",)]


@pytest.mark.parametrize("name", chosen(CASES, "experts"))
def test_every_layout_is_exact(name: str) -> None:
    report = verify_in_pool(*CASES[name], on_rank=_on_rank)
    assert report.passed, report


def test_a_forgotten_wait_is_found() -> None:
    report = verify_in_pool(*CASES["tensor, pipeline"], "forget", on_rank=_on_rank)
    assert not report.passed
