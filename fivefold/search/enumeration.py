"""Enumerates the legal layouts of a model on a number of devices.

The table of candidates is built axis by axis, each time a cross product followed by a filter, so
that a million candidates take a second. `check` decides which sizes of one axis are legal, and
checks again every layout that is recommended.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.batch_rules import MAX_MICROBATCHES
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.divisors import divisors
from fivefold.config.parallel import ParallelConfig, TokenDispatcher
from fivefold.config.rules.dependence import leaves_idle
from fivefold.config.sharding import SHARDING
from fivefold.data_parallel.rules import check_replicas, keeps_blocks
from fivefold.data_parallel.zeropp_rules import ACTS_ON, part_fits, techniques
from fivefold.errors import ConfigError, Mistakes
from fivefold.mesh.grid import Grid
from fivefold.model.eight_bit.rules import gathers_as_multiplied
from fivefold.predict.times.context import legal_ways
from fivefold.search.columns import Columns, join, table, where
from fivefold.search.memory_choices import MemoryChoice, memory_choices
from fivefold.search.partitions import (
    ALL_SCHEDULES,
    Partition,
    enumerate_partitions,
    recomputing,
    runnable,
)
from fivefold.search.request import Only, permits
from fivefold.search.space import FIELDS, SHARDINGS, Space, sharing

SHARD = "data_parallel_shard_size"
MAX_MICRO_BATCH = 16  # largest micro-batch size that is tried, in sequences
MIN_SLICE = 256  # fewest tokens of a sequence on a context-parallel rank
FEW = 2  # numbers of sharding groups that are tried besides one


def enumerate_space(
    config: Config,
    world: int,
    given: frozenset[str] = frozenset(),
    widest: int = 16,
    shortest: int = MIN_SLICE,
    only: Only = MappingProxyType({}),
) -> Space:
    """Every legal layout of `config` on `world` devices.

    Args:
        config: the model, the batch, and the settings that were given.
        world: number of devices.
        given: names of the settings that must stay as they are.
        widest: largest tensor-parallel size to try, for example two nodes.
        shortest: fewest tokens of a sequence on a context-parallel rank.
        only: the values to choose from, as `Request` has them.
    """
    axes = _Axes(config, world, given, widest, shortest, only)
    columns = _meshes(axes)
    pps = sorted({int(pp) for pp in columns["pp"]})
    among = only.get("pipeline_schedule", ALL_SCHEDULES)
    found = enumerate_partitions(config, given, pps, among)
    # Each filter runs as soon as its columns exist: the last tables have millions of rows.
    columns = join(columns, axes.sharding())
    columns = where(columns, axes.sharding_holds(columns))
    columns = join(
        columns, {"partition": range(len(found)), "_pp": [partition.pp for partition in found]}
    )
    columns = where(columns, columns["pp"] == columns.pop("_pp"))
    columns = recomputing(runnable(columns, config, found), config, found)
    columns = join(columns, axes.experts(set(columns["tp"].tolist())))
    if FIELDS["etp"] not in given:
        columns = where(columns, (columns["etp"] == 1) | (columns["etp"] == columns["tp"]))
    stage = columns["dp"] * columns["cp"] * columns["tp"]
    columns = where(columns, stage % (columns["ep"] * columns["etp"]) == 0)
    columns = where(columns, axes.nodes_hold(columns))
    columns = where(columns, axes.replicas_hold(columns))
    choices = memory_choices(config, given)
    permitted = [n for n, choice in enumerate(choices) if permits(only, choice.settings)]
    columns = join(columns, {"memory": permitted})
    columns = where(columns, sharing(columns, choices))
    columns = _paired(columns, config, given, found, choices)
    # The flex dispatcher sends the fewest rows: none twice to the same rank or node.
    # It has no rows for each expert, which could be padded.
    pads = config.experts.moe_pad_expert_input_to_capacity
    dispatcher: TokenDispatcher | None = "alltoall" if pads else "flex"
    if "moe_token_dispatcher_type" in given:
        dispatcher = None
    # Delaying dW hides more messages and costs nothing.
    delays = config.parallel.delay_wgrad_compute or "delay_wgrad_compute" not in given
    every = config, world, found, choices, columns
    return Space(*every, dispatcher=dispatcher, delays_weights=delays)


@dataclass(frozen=True)
class _Axes:
    """The legal values of each axis of parallelism for the arguments of `enumerate_space`."""

    config: Config
    world: int
    given: frozenset[str]
    widest: int
    shortest: int
    only: Only

    def sizes(
        self, axis: str, legal: Callable[[int], bool] = bool, tried: Callable[[int], bool] = bool
    ) -> list[int]:
        """Legal sizes of an axis: the given size, else every tried divisor of the device count."""
        sizes = [size for size in divisors(self.world) if tried(size)]
        if FIELDS[axis] in self.given:
            size = getattr(self.config.parallel, FIELDS[axis])
            sizes = [size] if size > 0 and self.world % size == 0 else []
        among = self.only.get(FIELDS[axis], sizes)
        return [size for size in sizes if size in among and legal(size)]

    def tensor(self) -> list[int]:
        """Tensor-parallel sizes that `check` accepts for the model, whatever the batch."""
        experts = self.config.model.num_experts is not None

        def passes(size: int) -> bool:
            alone = {
                FIELDS["tp"]: size,
                "micro_batch_size": size,
                "sequence_parallel": experts and size > 1,
            }
            try:
                check(_plain(self.config).with_batch(size).with_values(**alone), size, planned=True)
            except ConfigError:
                return False
            return True

        return self.sizes("tp", passes, lambda n: n <= self.widest)

    def context(self) -> list[int]:
        """Context-parallel sizes; `context_holds` checks the heads, which depend on tp."""
        length, name = self.config.training.seq_length, FIELDS["cp"]
        sliced = self.config.parallel.num_sequence_slices > 1  # sequences are sliced already
        idle = leaves_idle(self.config, name, **{name: 1})
        return self.sizes(
            "cp",
            legal=lambda n: not idle if n == 1 else not sliced,
            tried=lambda n: n == 1 or length >= n * self.shortest,
        )

    def context_holds(self, columns: Columns) -> NDArray[np.bool_]:
        """The rows for which at least one allowed kind of context-parallel communication works."""

        def holds(tp: int, cp: int) -> bool:
            sizes = {FIELDS["tp"]: tp, FIELDS["cp"]: cp}
            config = self.config.with_values(**sizes)
            return any(True for _ in legal_ways(config, self.given, self.only))

        pairs = list(zip(columns["tp"].tolist(), columns["cp"].tolist(), strict=True))
        known = {pair: holds(*pair) for pair in set(pairs)}
        return np.array([known[pair] for pair in pairs], bool)

    def pipeline(self) -> list[int]:
        """Pipeline-parallel sizes: at most one rank per layer, unless a layout string is given."""
        layers = self.config.model.num_layers
        written = "pipeline_model_parallel_layout" in self.given
        launched = self.config.training.cuda_graph_impl is None
        return self.sizes(
            "pp", legal=lambda n: launched or n == 1, tried=lambda n: written or n <= layers
        )

    def experts(self, tensor: Collection[int]) -> dict[str, list[int]]:
        """Pairs of expert-parallel and expert-tensor-parallel sizes; etp is 1 or in `tensor`."""
        experts, inner = self.config.model.num_experts, self.config.model.expert_ffn_size
        if experts is None:
            return {"ep": [1], "etp": [1]}
        ep = self.sizes("ep", lambda n: experts % n == 0)

        def divides(etp: int) -> bool:
            return inner % etp == 0 and keeps_blocks(self.config, 1, etp)

        etp = self.sizes("etp", divides, lambda n: n == 1 or n in tensor)
        pairs = [(e, t) for e in ep for t in etp]
        return {"ep": [e for e, _ in pairs], "etp": [t for _, t in pairs]}

    @property
    def strategies(self) -> list[int]:
        """Indices in `SHARDINGS` of the strategies that are compatible with the given settings."""
        parallel = self.config.parallel
        found = list(SHARDINGS)
        if "data_parallel_sharding_strategy" in self.given:
            found = [parallel.sharding]
        names = self.only.get("data_parallel_sharding_strategy", frozenset(SHARDING))
        found = [sharding for sharding in found if sharding.name in names]
        if parallel.pipeline_max_unsharded_stages is not None:  # only parameters are gathered
            found = [sharding for sharding in found if sharding.splits_parameters]
        if parallel.overlap_param_gather_with_optimizer_step:  # parameters are gathered once
            found = [s for s in found if s.splits_optimizer and not s.splits_parameters]
        if parallel.ddp_bucket_size != ParallelConfig.ddp_bucket_size:
            found = [sharding for sharding in found if not sharding.splits_optimizer]
        for technique in techniques(parallel):
            found = [sharding for sharding in found if ACTS_ON[technique](sharding)]
        narrow = self.config.training.fp8_param_gather
        if narrow or parallel.ddp_reduce_scatter_with_fp32_accumulation:
            found = [sharding for sharding in found if sharding.splits_optimizer]
        if self.config.optimizer.store_param_remainders:  # sharding would save nothing
            found = [sharding for sharding in found if not sharding.splits_optimizer]
        if parallel.grad_reduce_in_bf16 and self.config.gathers_weights("no_shard"):
            # An all-reduce would sum in bf16.
            found = [sharding for sharding in found if sharding.splits_optimizer]
        return [SHARDINGS.index(sharding) for sharding in found]

    @property
    def shard_size(self) -> int | None:
        """Given number of data-parallel ranks in a sharding group; None if it was not given."""
        return self.config.parallel.data_parallel_shard_size if SHARD in self.given else None

    def sharding(self) -> dict[str, list[int]]:
        """Pairs of a sharding strategy and a number of sharding groups."""
        instances = self.sizes("instances")
        if self.shard_size is None and len(instances) > 1:
            instances = [*instances[:1], *instances[1 :: -(-len(instances) // FEW)]]
        elif self.shard_size is not None and self.world % self.shard_size:
            instances = []
        pairs = [
            (s, n)
            for s in self.strategies
            for n in instances
            if SHARDINGS[s].splits_optimizer or n == 1
        ]
        return {"strategy": [s for s, _ in pairs], "instances": [n for _, n in pairs]}

    def sharding_holds(self, columns: Columns) -> NDArray[np.bool_]:
        """The rows whose sharding groups divide dp, and have the given size or several ranks."""
        dp, instances = columns["dp"], columns["instances"]
        ranks = dp * columns["cp"]
        holds: NDArray[np.bool_] = dp % instances == 0
        if self.shard_size is not None:
            holds &= dp == self.shard_size * instances
        elif FIELDS["instances"] not in self.given:
            holds &= (instances == 1) | (ranks > instances)
        split = np.array([sharding.splits_optimizer for sharding in SHARDINGS])
        if not all(split[self.strategies]):  # else a single rank would have no choice
            holds &= (ranks > 1) | ~split[columns["strategy"]]
        return holds

    def nodes_hold(self, columns: Columns) -> NDArray[np.bool_]:
        """The rows in which ZeRO++'s node groups divide the sharding group, or which may gather in
        8 bits."""
        parallel, narrow = self.config.parallel, self.config.training.fp8_param_gather
        if not narrow and not techniques(parallel):
            return np.ones(len(columns["dp"]), bool)
        sizes = (parallel.zero_hpz_partition_size, parallel.zero_qgz_partition_size)
        experts = self.config.model.num_experts is not None

        def holds(instances: int, dp: int, cp: int, tp: int, ep: int, etp: int) -> bool:
            grid = Grid(1, instances, dp // instances, cp, tp, ep, etp)
            fits = all(size == 1 or part_fits(size, grid, experts) for size in sizes)
            fits &= not narrow or gathers_as_multiplied(grid, self.config.model)
            return grid.dp_shard * grid.cp > 1 and fits

        return _holding(columns, ("instances", "dp", "cp", "tp", "ep", "etp"), holds)

    def replicas_hold(self, columns: Columns) -> NDArray[np.bool_]:
        """The rows that have replicas to compare, if that is required."""
        config, training = self.config, self.config.training
        if not (
            config.logging.log_straggler
            or training.check_weight_hash_across_dp_replicas_interval
            or training.check_loss_across_dp_replicas_interval
        ):
            return np.ones(len(columns["dp"]), bool)
        sizes = ("instances", "cp", "tp", "ep", "etp")

        def holds(strategy: int, dp: int, *others: int) -> bool:
            each: dict[str, Any] = {FIELDS[n]: v for n, v in zip(sizes, others, strict=True)}
            each["data_parallel_sharding_strategy"] = SHARDINGS[strategy].name
            parallel = config.with_values(**each, **{SHARD: dp // others[0]}).parallel
            mistakes = Mistakes()
            check_replicas(config, parallel, mistakes)
            return not mistakes.found

        return _holding(columns, ("strategy", "dp", *sizes), holds)

    def micro_batches(self) -> list[int]:
        """Micro-batch sizes to try, in sequences."""
        training = self.config.training
        sizes = [1 << n for n in range(MAX_MICRO_BATCH.bit_length())]
        if FIELDS["mbs"] in self.given:
            sizes = [training.micro_batch_size]
        return [n for n in sizes if training.global_batch_size % n == 0]


def _holding(
    columns: Columns, names: Sequence[str], holds: Callable[..., bool]
) -> NDArray[np.bool_]:
    """The rows for which a function of these columns is true."""
    rows = np.stack([columns[name] for name in names], axis=1)
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    each = np.array([holds(*map(int, row)) for row in distinct], bool)
    found: NDArray[np.bool_] = each[which.reshape(-1)]
    return found


def _plain(config: Config) -> Config:
    """The model and its training settings, without parallelism or memory techniques."""
    training = replace(
        config.training,
        fp8_param_gather=False,
        cuda_graph_impl=None,
        check_weight_hash_across_dp_replicas_interval=0,
        check_loss_across_dp_replicas_interval=0,
    )
    return Config(config.model, training=training, optimizer=config.optimizer)


def _meshes(axes: _Axes) -> Columns:
    """Meshes with tp x cp x pp x dp = world, and micro-batch sizes that divide the batch."""
    config, world = axes.config, axes.world
    columns = table({"tp": axes.tensor() if _can_be_sliced(config) else []})
    columns = join(columns, {"cp": axes.context()})
    columns = where(columns, axes.context_holds(columns))
    columns = join(columns, {"pp": axes.pipeline()})
    used = columns["tp"] * columns["cp"] * columns["pp"]
    columns = where(columns, world % used == 0)
    columns["dp"] = world // (columns["tp"] * columns["cp"] * columns["pp"])
    columns = join(columns, {"mbs": axes.micro_batches()})
    training, unit = config.training, columns["mbs"].astype(np.int64) * columns["dp"]
    batch = training.global_batch_size
    smaller = gcd(batch, *training.rampup_batch_size[:2])  # divides every batch of the ramp
    count = columns["microbatches"] = np.where(smaller % unit, 0, batch // unit).astype(np.int32)
    columns = where(columns, (count > 0) & (count <= MAX_MICROBATCHES))
    return _with_sequence_parallel(columns, config, axes.given)


def _can_be_sliced(config: Config) -> bool:
    """Whether the model and the sequence length allow the given number of sequence slices."""
    slices, model = config.parallel.num_sequence_slices, config.model
    whole = not (model.multi_latent_attention or model.mtp_num_layers)
    return slices == 1 or (config.training.seq_length % slices == 0 and whole)


def _with_sequence_parallel(columns: Columns, config: Config, given: frozenset[str]) -> Columns:
    """Add the column of sequence parallelism: on wherever it is possible, unless it was given.

    Models with experts require it together with tensor parallelism.
    """
    asked, slices = config.parallel.sequence_parallel, config.parallel.num_sequence_slices
    sequences = columns["mbs"].astype(np.int64)
    tokens = sequences * (config.training.seq_length // slices) // columns["cp"]
    wide = columns["tp"] > 1
    can = wide & (tokens % columns["tp"] == 0)
    without = ~wide if config.model.num_experts is not None else np.ones_like(wide)
    chosen = can if "sequence_parallel" not in given else np.full_like(wide, asked)
    columns["sp"] = chosen.astype(np.int32)
    return where(columns, np.where(chosen, can, without))


def _paired(
    columns: Columns,
    config: Config,
    given: frozenset[str],
    found: Sequence[Partition],
    choices: Sequence[MemoryChoice],
) -> Columns:
    """Add the column of pairs, and drop combined 1F1B where there is nothing to overlap.

    Full recomputation starts each backward with a forward of its own, so it cannot be paired. Both
    halves of a pair of combined 1F1B may be of one stage, whose layers must then stay gathered.
    """
    combined = np.array([partition.schedule == "combined_1f1b" for partition in found], bool)[
        columns["partition"]
    ]
    frees = np.array([sharding.splits_parameters for sharding in SHARDINGS])[columns["strategy"]]
    if config.parallel.pipeline_max_unsharded_stages is not None:
        frees[:] = False
    pairs = np.array([partition.known.pairs for partition in found], bool)[columns["partition"]]
    whole = np.array([choice.is_full for choice in choices], bool)[columns["memory"]]
    hides = (columns["ep"] > 1) & ~whole & pairs & ~(combined & frees)
    if config.parallel.moe_token_dispatcher_type == "allgather":  # has no all-to-alls to hide
        hides[:] = False
    asked = "overlap_moe_expert_parallel_comm" in given
    wanted = config.parallel.overlap_moe_expert_parallel_comm if asked else True
    asked = asked or config.parallel.delay_wgrad_compute or bool(config.memory.modules_of_halves)
    columns["pairs"] = (hides & wanted).astype(np.int32)
    if asked and wanted:
        return where(columns, hides)
    if asked or "pipeline_schedule" in given:
        return columns
    return where(columns, hides | ~combined)
