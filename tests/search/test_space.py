from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.description.shape import ModelParts, forward_flops
from fivefold.errors import ConfigError
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_choices import further_choices
from fivefold.search.partitions import balanced_layout
from fivefold.search.space import SHARDINGS, Space

WORLD = 16
MODELS = ("llama3-8b", "debug-gpt", "mixtral-8x7b", "deepseek-v2-lite")


@cache
def space_of(model: str) -> Space:
    config = Config(PRESETS[model]).with_values(global_batch_size=32, seq_length=512)
    return enumerate_space(config, WORLD)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=40)
@given(place=st.floats(0, 1, exclude_max=True))
def test_every_enumerated_layout_is_legal(model: str, place: float) -> None:
    space = space_of(model)
    row = int(place * len(space))
    layout = check(space.config_of(row), WORLD, planned=True)
    at = {name: int(column[row]) for name, column in space.columns.items()}
    grid = layout.grid
    assert (grid.tp, grid.cp, grid.pp, grid.dp) == (at["tp"], at["cp"], at["pp"], at["dp"])
    assert (grid.ep, grid.etp, grid.dp_replicate) == (at["ep"], at["etp"], at["instances"])
    assert layout.num_microbatches == at["microbatches"]
    partition = space.partitions[at["partition"]]
    assert (layout.split, layout.schedule) == (partition.split, partition.schedule)
    assert int(space.shards[row]) == (1 if at["strategy"] == 0 else grid.dp_shard * grid.cp)


def test_no_legal_mesh_is_left_out() -> None:
    """Every power of two that `check` accepts, with one stage a rank and no sharding."""
    space = space_of("llama3-8b")
    names = ("tp", "cp", "pp", "mbs")
    found = set(zip(*(space.columns[name].tolist() for name in names), strict=True))
    sizes = [1, 2, 4, 8, 16]
    missing = []
    for tp in sizes:
        for cp in (1, 2):
            for pp in sizes:
                for mbs in sizes:
                    config = space.config.with_values(
                        tensor_model_parallel_size=tp,
                        sequence_parallel=tp > 1,
                        context_parallel_size=cp,
                        pipeline_model_parallel_size=pp,
                        micro_batch_size=mbs,
                    )
                    try:
                        check(config, WORLD, planned=True)
                    except ConfigError:
                        continue
                    if (tp, cp, pp, mbs) not in found:
                        missing.append((tp, cp, pp, mbs))
    assert not missing


def test_steps_that_are_graphs_have_no_pipelines_and_move_nothing() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(
        cuda_graph_impl="local", reset_attention_mask=False, global_batch_size=64
    )
    space = enumerate_space(config, 16)
    assert len(space) > 50 and set(space.columns["pp"].tolist()) == {1}
    for row in range(0, len(space), 7):
        check(space.config_of(row), 16, planned=True)
    for choice in further_choices(config, frozenset()):
        check(config.with_values(**choice.settings), 1)


def test_no_layout_comes_twice() -> None:
    columns = np.stack(list(space_of("llama3-8b").columns.values()))
    assert len(np.unique(columns, axis=1).T) == columns.shape[1]


def test_what_is_given_stays() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(
        global_batch_size=32,
        seq_length=512,
        tensor_model_parallel_size=2,
        data_parallel_sharding_strategy="optim_grads",
        pipeline_schedule="zb_h1",
        recompute_granularity="full",
    )
    fixed = ("tensor_model_parallel_size", "data_parallel_sharding_strategy", "pipeline_schedule")
    space = enumerate_space(config, WORLD, frozenset({*fixed, "recompute_granularity"}))
    assert len(space)
    assert set(space.columns["tp"].tolist()) == {2}
    assert {SHARDINGS[s].name for s in space.columns["strategy"].tolist()} == {"optim_grads"}
    assert {partition.schedule for partition in space.partitions} <= {"zb_h1", "1f1b"}
    row = len(space) - 1
    assert space.config_of(row).memory.recompute_granularity == "full"


def test_deepseek_is_cut_as_its_users_cut_it() -> None:
    """Megatron-Bridge's layout for 16 pipeline ranks: one layer beside prediction and head."""
    config = Config(PRESETS["deepseek-v3"]).with_values(seq_length=4096)
    assert balanced_layout(config, 16) == "Et*4|(t*4|)*14tmL"


@given(layers=st.integers(1, 70), stages=st.integers(1, 24), mtp=st.integers(0, 1))
def test_balanced_layouts_keep_all_layers_and_are_balanced(
    layers: int, stages: int, mtp: int
) -> None:
    model = replace(PRESETS["llama3-8b"], num_layers=layers, mtp_num_layers=mtp)
    config = Config(model)
    text = balanced_layout(config, stages)
    split = SplitSettings(layers, stages, layout=text, mtp_num_layers=mtp).split()
    counts = [len(stage.layers) for stage in split.stages]
    assert sum(counts) == layers
    assert split.stages[-1].mtp == mtp
    length = config.training.seq_length
    whole = forward_flops(model, length).total
    layer = forward_flops(model, length, ModelParts((0,))).total
    assert max(counts[:-1], default=0) * layer <= whole / stages + layer
