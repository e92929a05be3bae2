"""Records of parameters, over all ranks of a layout."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import islice
from math import prod

import pytest

from fivefold.check import check
from fivefold.config.sources import read_config
from fivefold.counts.parameters import parameter_records
from fivefold.counts.shards import held, num_expert_shards, num_shards
from fivefold.description.shape import canonical_name, parameter_shapes
from fivefold.layout import Layout
from tests.audit.layouts import random_layouts
from tests.verify.cases import MODELS, config, flags

EXPERTS = [
    check(
        read_config(
            model="mixtral-8x7b",
            global_batch_size=128,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            pipeline_model_parallel_size=2,
            expert_model_parallel_size=4,
            expert_tensor_parallel_size=etp,
            data_parallel_sharding_strategy=strategy,
            num_distributed_optimizer_instances=instances,
        ),
        32,
        planned=True,
    )
    for etp in (1, 2)
    for strategy, instances in (("no_shard", 1), ("optim", 1), ("optim_grads", 2))
]

COPIES = [  # of the embedding, or of the whole model, on one rank
    check(
        config(
            replace(MODELS[family], mtp_num_layers=stages.count("m")),
            **flags(pp=2, stages=stages) | {"micro_batch_size": 1, "pipeline_schedule": schedule},
        ),
        4,
    )
    for family, schedule, stages in (
        ("llama tied", "dualpipe", "Et|ttL"),
        ("llama tied", "gpipe", "v:E|t|t|tL"),
        ("llama tied", "gpipe", "Et|ttL"),
        ("llama tied", "gpipe", "Et|ttmmL"),
        ("llama tied", "gpipe", "v:Et|t|tm|L"),
        ("llama tied", "gpipe", "v:Et|ttm||L"),
        ("llama tied", "dualpipe", "Etttm|L"),
        ("llama", "gpipe", "Et|tt|m|L"),
        ("llama", "dualpipe", "Et|ttmL"),
    )
]


def is_expert(name: str) -> bool:
    return ".experts." in name


def layouts() -> list[Layout]:
    return [*islice(random_layouts(3), 60), *EXPERTS, *COPIES]


def _elements(layout: Layout, rank: int, name: str, shape: tuple[int, ...]) -> float:
    """Of a rank's shard."""
    if is_expert(name):
        return prod(shape) / num_expert_shards(layout)
    at = layout.grid.coordinates(rank)
    shards = num_shards(layout)
    index = layout.grid.dp_rank(rank) * layout.grid.cp + at["cp"]
    return held(shape, shards, index % shards)


def test_every_element_is_counted_on_one_rank() -> None:
    for layout in layouts():
        counted: Counter[str] = Counter()
        for rank in range(layout.grid.world_size):
            for record in parameter_records(layout, rank):
                size = _elements(layout, rank, record.name, record.shape)
                counted[record.stored] += size if record.counted else 0
        model = layout.config.model
        whole = {
            name: prod(shape)
            for name, shape in parameter_shapes(model).items()
            if canonical_name(model, name) == name
        }
        assert counted == whole


def test_every_parameter_is_written_and_loaded_under_one_name_on_a_rank() -> None:
    for layout in layouts():
        writers = defaultdict(set)
        for rank in range(layout.grid.world_size):
            records = parameter_records(layout, rank)
            loaded = [record.stored for record in records if record.loaded]
            assert len(loaded) == len(set(loaded))
            assert set(loaded) == {record.stored for record in records}
            assert all(record.loaded for record in records if record.written)
            for record in records:
                if record.written:
                    writers[record.stored].add(layout.grid.coordinates(rank)["pp"])
        names = {
            canonical_name(layout.config.model, n) for n in parameter_shapes(layout.config.model)
        }
        assert set(writers) == names
        assert all(len(ranks) == 1 for ranks in writers.values())


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_are_summed_over_ranks_of_their_own(layout: Layout) -> None:
    for record in parameter_records(layout, 0):
        assert record.sums[0] == ("edp" if is_expert(record.name) else "data")
        if record.name.endswith("experts.down_proj.weight"):
            assert record.split_dim == 2 and record.counted


def test_all_ranks_of_a_group_sum_the_same_parameters() -> None:
    axes = {"data": ("dp_replicate", "dp_shard", "cp"), "tp": ("tp",)}
    for layout in islice(random_layouts(4), 40):
        every = [parameter_records(layout, rank) for rank in range(layout.grid.world_size)]
        for group, over in axes.items():
            summed = [[(r.name, r.shape) for r in records if group in r.sums] for records in every]
            for ranks in layout.grid.groups(over):
                assert len({tuple(summed[rank]) for rank in ranks}) == 1
