"""Ways in which context parallelism communicates, and experts' messages hidden in pairs."""

from typing import Any

import numpy as np
import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.predict.cluster import preset
from fivefold.predict.step import predict
from fivefold.predict.times.context import best_context, configured_ways, context_way, context_ways
from fivefold.search.enumeration import enumerate_space
from fivefold.search.request import Request
from fivefold.search.search import with_context
from tests.predict.layouts import planned

WORLD = 64
CLUSTER = preset("H100", WORLD)


def _config(cp: int, length: int, model: str = "llama3-8b", **settings: Any) -> Config:
    return Config(PRESETS[model]).with_values(
        context_parallel_size=cp, seq_length=length, micro_batch_size=1, **settings
    )


def test_bytes_of_each_way() -> None:
    """8,192 own tokens; K and V have 2 x 1,024 features in bf16, Q and O 2 x 4,096."""
    config, keys = _config(4, 4 * 8192), 8192 * 2048 * 2
    sent = {way.name: way.sent for way in context_ways(config, CLUSTER)}
    assert (sent["p2p"].forward, sent["p2p"].backward) == (3 * keys, 3 * keys + 6 * keys)
    assert (sent["all_gather"].forward, sent["all_gather"].backward) == (3 * keys, 6 * keys)
    assert sent["a2a"].forward == 3 / 4 * (keys + 4 * keys)
    assert set(sent) == {"p2p", "all_gather", "a2a", "a2a+p2p 2x2"}


def test_a_ring_hides_from_as_many_tokens_as_the_condition_says() -> None:
    long = context_way(_config(16, 16 * 65_536), CLUSTER, "p2p", ())
    short = context_way(_config(16, 16 * 512), CLUSTER, "p2p", ())
    assert 512 < long.tokens < 65_536 and short.tokens > 512
    assert long.exposed.forward <= CLUSTER.gpu.overlap_slowdown * long.attention.forward
    assert short.exposed.forward > short.attention.forward


def _attention(length: int, **settings: Any) -> float:
    """Seconds of a layer's attention, without launches."""
    way = context_way(_config(1, length, **settings), CLUSTER, "p2p", ())
    return way.attention.total - 3 * CLUSTER.gpu.launch


def test_attention_takes_as_long_as_what_is_seen() -> None:
    """A window that is no limit is none; a short one makes time grow with the length alone."""
    full, half = _attention(65_536), _attention(65_536, window_size=1024, window_attn_skip_freq="2")
    windowed = _attention(65_536, window_size=1024)
    assert _attention(65_536, window_size=65_536) == full
    assert half == pytest.approx((full + windowed) / 2)
    assert _attention(131_072, window_size=1024) == pytest.approx(2 * windowed, rel=0.01)
    # 1,024 keys of a query, of 32,768; short rows fill the device less.
    seen = 1024 / 32_768 * (2048 + 384) / 2048 * 65_536 / (65_536 + 384)
    assert windowed == pytest.approx(seen * full, rel=0.01)


@pytest.mark.parametrize("window", [None, 512])
def test_packed_rows_take_as_long_as_rows_of_that_length(window: int | None) -> None:
    """As many tokens in shorter rows."""
    packed = _attention(16_384, document_length=2048, window_size=window)
    assert packed == pytest.approx(8 * _attention(2048, window_size=window))
    assert _attention(16_384, document_length=20_000) == _attention(16_384)


def test_ways_that_the_heads_do_not_allow_are_not_offered() -> None:
    config = _config(8, 65_536, tensor_model_parallel_size=8, sequence_parallel=True)
    names = {way.kind for way in context_ways(config, CLUSTER)}
    assert "a2a" not in names and {"p2p", "all_gather", "a2a+p2p"} <= names


@pytest.mark.parametrize(("cp", "length"), [(2, 8192), (8, 16_384), (16, 1 << 20)])
def test_the_best_is_the_fastest_legal_one(cp: int, length: int) -> None:
    config = _config(cp, length, global_batch_size=WORLD)
    ways = context_ways(config, CLUSTER)
    chosen = config.with_values(**best_context(config, CLUSTER))
    check(chosen, WORLD, planned=True)
    assert configured_ways(chosen, CLUSTER) == [(ways[0], 1.0)]
    assert ways[0].seconds == min(way.seconds for way in ways)


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v2-lite"])
def test_layers_that_communicate_in_turns_take_the_mean_of_their_ways(model: str) -> None:
    """Whichever comes first: latents that are gathered in some layers, too."""

    def times(*kinds: str) -> dict[str, float]:
        layout = planned(model, 4, cp=4, gbs=4, seq=8192, cp_comm_type=kinds)
        return {part.name: part.seconds for part in predict(layout, CLUSTER).parts}

    gathered, ring = times("all_gather"), times("p2p")
    layers = PRESETS[model].num_layers
    for turn in (("all_gather", "p2p"), ("p2p", "all_gather"), ("p2p", "p2p", "all_gather")):
        kinds = (turn * layers)[:layers]
        mixed, share = times(*kinds), kinds.count("all_gather") / layers
        for name in ("CP communication", "kernel efficiency", "recompute"):
            mean = share * gathered[name] + (1 - share) * ring[name]
            assert mixed[name] == pytest.approx(mean, rel=1e-6), (kinds, name)


def test_the_space_takes_the_best_way_unless_one_is_given() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(global_batch_size=WORLD, seq_length=8192)
    kept = frozenset({"tensor_model_parallel_size", "pipeline_model_parallel_size"})
    for given in (kept, kept | {"cp_comm_type"}):
        question = Request(config, given, CLUSTER)
        space = with_context(enumerate_space(config, WORLD, given), question)
        row = int(np.flatnonzero(space.columns["cp"] == 8)[0])
        found = space.config_of(row)
        fastest = best_context(found, CLUSTER)["cp_comm_type"]
        assert fastest != ("p2p",)
        assert found.parallel.cp_comm_type == (fastest if given == kept else ("p2p",))


def test_pairs_hide_what_experts_send_and_only_that() -> None:
    config = Config(PRESETS["mixtral-8x7b"]).with_values(global_batch_size=32, seq_length=512)
    space = enumerate_space(config, 16)
    columns = space.columns
    schedules = np.array([partition.schedule for partition in space.partitions])[
        columns["partition"]
    ]
    pairs = columns["pairs"] == 1
    assert pairs.any()
    assert (
        all(SCHEDULES[name].pairs for name in schedules[pairs]) and (columns["ep"][pairs] > 1).all()
    )
    assert pairs[schedules == "combined_1f1b"].all()
    row = int(np.flatnonzero(pairs)[0])
    assert space.config_of(row).parallel.overlap_moe_expert_parallel_comm
    check(space.config_of(row), 16, planned=True)
    fixed = enumerate_space(config, 16, frozenset({"overlap_moe_expert_parallel_comm"}))
    assert not fixed.columns["pairs"].any()
