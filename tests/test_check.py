"""Layouts at random: they pass and add up, or they are refused with splits that do pass."""

import re
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.check import check, divisors
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError
from fivefold.pipeline.validate import validate

SPLIT = re.compile(r"tp=(\d+) pp=(\d+) dp=(\d+)(?: gbs=(\d+))?")


@st.composite
def configs(draw: st.DrawFn) -> Config:
    def small(*values: int) -> int:
        return draw(st.sampled_from(values))

    heads = small(1, 2, 3, 4, 6, 8)
    model = ModelConfig(
        num_layers=small(1, 2, 3, 4, 6, 8, 12),
        hidden_size=heads * 16,
        num_attention_heads=heads,
        num_query_groups=small(*divisors(heads)),
        ffn_hidden_size=small(96, 128, 192),
        vocab_size=500,
    )
    return Config(model).with_values(
        tensor_model_parallel_size=small(1, 1, 2, 3, 4),
        pipeline_model_parallel_size=small(1, 1, 2, 3, 4),
        data_parallel_shard_size=small(-1, -1, -1, 1, 2),
        num_distributed_optimizer_instances=small(1, 1, 1, 2),
        data_parallel_sharding_strategy=draw(st.sampled_from(("no_shard", "optim", "optim_grads"))),
        num_virtual_stages_per_pipeline_rank=draw(st.sampled_from((None, None, 1, 2))),
        account_for_embedding_in_pipeline_split=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        micro_batch_size=small(1, 2),
        global_batch_size=small(4, 8, 12, 16, 24),
        seq_length=small(12, 16),
    )


@settings(max_examples=400, deadline=None)
@given(configs(), st.integers(1, 24))
def test_a_layout_adds_up_or_is_refused_with_splits_that_pass(config: Config, world: int) -> None:
    try:
        layout = check(config, world)
    except ConfigError as error:
        for mistake in error.mistakes:
            for choice in mistake.works:
                if match := SPLIT.fullmatch(choice):
                    check(_with_split(config, match), world)
        return
    grid, training = layout.grid, layout.config.training
    assert prod((grid.pp, grid.dp_replicate, grid.dp_shard, grid.cp, grid.tp)) == world
    batch = layout.num_microbatches * training.micro_batch_size * grid.dp
    assert batch == training.global_batch_size
    held = [layer for stage in layout.split.stages for layer in stage.layers]
    assert held == list(range(config.model.num_layers))
    assert set(layout.split.placement) == set(range(grid.pp))
    assert layout.config.parallel.data_parallel_shard_size == grid.dp_shard
    validate(layout.compute_program())


def _with_split(config: Config, match: re.Match[str]) -> Config:
    tp, pp, dp = (int(match[i]) for i in (1, 2, 3))
    replicas = config.parallel.num_distributed_optimizer_instances
    return config.with_values(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_shard_size=dp // replicas,
        global_batch_size=int(match[4] or config.training.global_batch_size),
    )


@given(configs(), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_each_suggested_flag_mends_its_mistake(config: Config, world: int) -> None:
    """A single flag removes the line that suggested it, whatever else is still wrong."""
    for mistake in _mistakes(config, world):
        for choice in mistake.works:
            if match := re.fullmatch(r"--(global-batch-size|seq-length) (\d+)", choice):
                mended = config.with_values(**{match[1].replace("-", "_"): int(match[2])})
                assert mistake.what not in [m.what for m in _mistakes(mended, world)]


def _mistakes(config: Config, world: int) -> tuple:
    try:
        check(config, world)
    except ConfigError as error:
        return error.mistakes
    return ()


@pytest.mark.parametrize("n", [1, 2, 12, 36, 97, 16384])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_split_is_suggested_even_where_the_batch_has_to_follow() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512)
    config = Config(model).with_values(tensor_model_parallel_size=2, global_batch_size=8)
    with pytest.raises(ConfigError, match="works: tp=1 pp=1 dp=3 gbs=6") as caught:
        check(config, 3)
    assert "try:   --nproc 4" in str(caught.value)


def test_bf16_on_the_wire_is_refused_where_nothing_would_honour_it() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512)
    config = Config(model).with_values(grad_reduce_in_bf16=True, precision="bf16")
    with pytest.raises(ConfigError, match="grad_reduce_in_bf16 has no effect on no_shard"):
        check(config, 2)
    check(config.with_values(precision="fp32"), 2)
    check(config.with_values(data_parallel_sharding_strategy="optim"), 2)
