"""Sequences cut into slices: their program is what is timed, swept and bounded."""

import numpy as np
import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.pipeline.simulate import peak_in_flight
from fivefold.predict.cluster import preset
from fivefold.predict.memory.liveness import moments
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict
from fivefold.search.bound_tables import Ranks
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_bound import memory_bound
from fivefold.search.time_bound import time_bound
from tests.predict.layouts import planned

CLUSTER = preset("H100", 16)
SLICED = {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 4}


def test_slices_shorten_the_fill_and_each_sends_its_part() -> None:
    plain = planned("llama3-8b", 16, pp=8, gbs=16, seq=8192)
    sliced = planned("llama3-8b", 16, pp=8, gbs=16, seq=8192, **SLICED)
    told = predict(sliced, CLUSTER)
    assert told.step_time < predict(plain, CLUSTER).step_time
    parts = {part.name: part.seconds for part in told.parts}
    inside = told.step_time - sum(
        parts[name] for name in ("DP communication", "optimizer", "jitter")
    )
    assert told.simulation.makespan == pytest.approx(inside, rel=1e-3)
    assert told.costs.hop < predict(plain, CLUSTER).costs.hop / 2
    found = moments(sliced, splits_backward=False)
    most = [float(rank.kept.sum(axis=1).max()) for rank in found]
    assert most == list(peak_in_flight(sliced.order().program()))


def test_the_space_is_legal_and_within_its_bounds() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(
        global_batch_size=64, seq_length=8192, **SLICED
    )
    space = enumerate_space(config, 16, frozenset(SLICED))
    few = space.take(np.arange(0, len(space), len(space) // 60))
    ranks = Ranks.of(config.model, few.partitions)
    times = time_bound(few, ranks, CLUSTER).seconds
    sizes = memory_bound(few, ranks)
    for row, (bound, size) in enumerate(zip(times.tolist(), sizes.tolist(), strict=True)):
        try:
            layout = check(few.config_of(row), 16, planned=True)
        except ConfigError as error:  # tensor parallelism may not divide a slice's tokens
            assert "slice's tokens" in str(error)
            continue
        assert bound <= predict(layout, CLUSTER).step_time * (1 + 1e-9)
        assert size <= peak_memory(layout, CLUSTER).max_allocated * (1 + 1e-9)
