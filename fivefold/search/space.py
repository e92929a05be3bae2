"""The candidate layouts of a search, as a table of integers, and the meaning of each column."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.config.config import Config
from fivefold.config.parallel import TokenDispatcher
from fivefold.config.sharding import SHARDING
from fivefold.search.columns import Column, Columns, codes, join, where
from fivefold.search.memory_choices import MemoryChoice
from fivefold.search.partitions import Partition

SHARDINGS = tuple(SHARDING.values())

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "instances": "num_distributed_optimizer_instances",
        "mbs": "micro_batch_size",
    }
)
# `distinct` uses values up to DENSE as codes directly, and renumbers codes beyond SPARSE.
DENSE, SPARSE = 64, 1 << 22


@dataclass(frozen=True)
class Space:
    """A table of candidates, and the meaning of its numbers.

    Attributes:
        config: the model, the batch and every setting that is not searched.
        world: number of devices.
        partitions: the partitions that the column `partition` is an index into.
        memory: the recompute and offload choices that the column `memory` is an index into.
        columns: tp, sp, cp, pp, dp, ep, etp, mbs, microbatches, strategy, instances, partition,
            memory and pairs, which is 1 where forwards and backwards are paired to overlap the
            all-to-alls of experts.
        context: settings of context-parallel communication by (tp, cp, mbs).
        dispatcher: token dispatcher for expert parallelism; None takes the one in `config`.
        delays_weights: whether pairs delay weight gradients.
    """

    config: Config
    world: int
    partitions: Sequence[Partition]
    memory: Sequence[MemoryChoice]
    columns: Columns
    context: Mapping[tuple[int, int, int], Mapping[str, Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    dispatcher: TokenDispatcher | None = None
    delays_weights: bool = True

    def __len__(self) -> int:
        return len(self.columns["tp"])

    @cached_property
    def replicas(self) -> Column:
        """Number of ranks that share the state of dense parameters, or hold copies of it."""
        return self.columns["dp"] // self.columns["instances"] * self.columns["cp"]

    @cached_property
    def shards(self) -> Column:
        """Number of ranks that shard the state of dense parameters; 1 without sharding."""
        return np.where(self.sharded("splits_optimizer"), self.replicas, 1)

    @cached_property
    def edp(self) -> Column:
        """Number of ranks that hold a copy, or a shard, of an expert's parameter."""
        c = self.columns
        return c["dp"] * c["cp"] * c["tp"] // (c["ep"] * c["etp"])

    @cached_property
    def expert_shards(self) -> Column:
        """Number of ranks that shard an expert's state (as `num_expert_shards`), or hold copies of
        it."""
        shards = self.edp // np.gcd(self.edp, self.columns["instances"])
        return np.where(self.sharded("splits_optimizer") & (self.replicas == 1), 1, shards)

    def sharded(self, what: str) -> NDArray[np.bool_]:
        """For each candidate, whether this attribute of its `Sharding` is true."""
        found: NDArray[np.bool_] = np.array([getattr(each, what) for each in SHARDINGS])
        return found[self.columns["strategy"]]

    def by_partition(self, value: Callable[[Partition], Any]) -> NDArray[Any]:
        """For each candidate, a value of its partition."""
        return np.array([value(each) for each in self.partitions])[self.columns["partition"]]

    def take(self, index: Column) -> "Space":
        """The candidates in these rows, in this order."""
        columns = {name: column[index] for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def with_memory(self, choices: Sequence[MemoryChoice]) -> "Space":
        """Every candidate combined with each of these memory choices, in place of its own."""
        few, _ = self.distinct([name for name in self.columns if name != "memory"])
        kept = {name: column for name, column in few.columns.items() if name != "memory"}
        columns = join(kept, {"memory": range(len(choices))})
        whole = np.array([choice.is_full for choice in choices], bool)[columns["memory"]]
        columns = where(columns, ~(whole & (columns["pairs"] == 1)))
        return replace(self, memory=choices, columns=where(columns, sharing(columns, choices)))

    def distinct(self, names: Sequence[str]) -> tuple["Space", Column]:
        """One candidate for each combination of values in these columns, and an index to them."""
        index: Column = np.zeros(len(self), np.int64)
        count = 1
        for name in names:
            column = self.columns[name]
            more = int(column.max(initial=0)) + 1
            if more > DENSE:
                column, more = codes(column)
            if count * more > SPARSE:
                index, count = codes(index)
            index, count = index * more + column, count * more
        index, count = codes(index)
        rows = np.zeros(count, np.int64)
        rows[index] = np.arange(len(self))
        return self.take(rows), index

    def settings(self, row: int) -> dict[str, Any]:
        """The settings of a candidate, by field name."""
        at = {name: int(column[row]) for name, column in self.columns.items()}
        partition, choice = self.partitions[at["partition"]], self.memory[at["memory"]]
        settings: dict[str, Any] = {field: at[name] for name, field in FIELDS.items()}
        settings["data_parallel_shard_size"] = at["dp"] // at["instances"]
        settings["data_parallel_sharding_strategy"] = SHARDINGS[at["strategy"]].name
        settings["sequence_parallel"] = bool(at["sp"])
        if at["pairs"]:
            settings["overlap_moe_expert_parallel_comm"] = True
            settings["delay_wgrad_compute"] = self.delays_weights
        if self.dispatcher and at["ep"] > 1:
            settings["moe_token_dispatcher_type"] = self.dispatcher
        settings |= self.context.get((at["tp"], at["cp"], at["mbs"]), {})
        return {**settings, **partition.settings, **choice.settings}

    def config_of(self, row: int) -> Config:
        """The configuration of a candidate."""
        return self.config.with_values(**self.settings(row))


def sharing(columns: Columns, choices: Sequence[MemoryChoice]) -> NDArray[np.bool_]:
    """The rows whose memory choice applies; some choices apply only with context parallelism."""
    needs = np.array([choice.needs_context for choice in choices], bool)[columns["memory"]]
    rows: NDArray[np.bool_] = ~needs | (columns["cp"] > 1)
    return rows
