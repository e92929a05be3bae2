"""Turns a published run into configurations, properties of its framework, and measurements.

If a row leaves settings open (micro-batch, stages per rank, recomputation, framework), there are
several configurations. What no column gives follows from the framework and its release, never from
the row's results.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.sharding import SHARDING, Sharding
from fivefold.description.shape import training_flops
from fivefold.errors import ConfigError, DataError, FivefoldError
from fivefold.layout import Layout
from fivefold.predict.software import (
    DISPATCHERS,
    MODULES,
    Attention,
    Dispatcher,
    Module,
    Software,
)
from fivefold.published.frameworks.framework import Framework
from fivefold.published.frameworks.registry import frameworks_of
from fivefold.published.recomputed import ways_to_recompute
from fivefold.published.row import (
    NOT_PUBLISHED,
    OUT_OF_MEMORY,
    PublishedRow,
    cluster_of,
    model_of,
)
from fivefold.search.partitions import balanced_layout

_TERA = 1e12
_KERNELS: Mapping[str, Attention] = MappingProxyType(
    {"cudnn": "best", "flash2": "flash2", "flash1": "flash1", "scores": "scores"}
)


def software_of(row: PublishedRow, framework: Framework) -> Software:
    """Kernels and habits of a framework in a row's run, and what the row itself says about them."""
    note, habits = row.text("note"), framework.software
    stage, kind = _strategy(row, framework).zero_stage, row.text("prec")
    wire = _wire_bytes(row) or habits.gradient_bytes or (2.0 if kind == "fp16" else None)
    deterministic = "deterministic" in note.split()
    return replace(
        habits,
        fused="eager" not in note.split() and habits.fused,
        attention=_attention_of(row, habits),
        gather_rate=habits.gather_rate if stage == 3 else None,
        reduces_whole=habits.reduces_whole and stage in (1, 2),
        broadcasts_updates=habits.broadcasts_updates and stage in (1, 2),
        accumulates_apart="always" if deterministic else habits.accumulates_apart,
        gradient_bytes=wire,
        keeps_every_second=row.text("recomp") == "selective-op",
        whole_graph=is_graphed(row, framework),
        graphed=_graphed(row),
        dispatcher=_dispatcher(row),
        blocks_launches="blocking launches" in note,
        imbalance=1.2 if "dropless" in note else 1.0,
    )


def _wire_bytes(row: PublishedRow) -> float | None:
    """Bytes of a gradient element on the wire, if the row tells."""
    given = row.text("grads")
    sizes = {"fp16": 2.0, "bf16": 2.0, "fp32": 4.0}
    if given and given not in sizes:
        raise DataError(f"grads must be one of {', '.join(sizes)}, not {given!r}")
    return sizes.get(given)


def _attention_of(row: PublishedRow, habits: Software) -> Attention:
    """The attention kernel: as its column or a note tells, or else that of the framework."""
    column = row.text("attention")
    if column:
        if column not in _KERNELS:
            raise DataError(f"attention must be one of {', '.join(_KERNELS)}, not {column!r}")
        return _KERNELS[column]
    given = re.search(
        r"\b(cudnn)|\b(?:flash[ -]?(?:attention|attn)?|fa)[ -]?v?([1-4])?\b", row.text("note")
    )
    if given:
        releases: dict[str | None, Attention] = {None: "flash1", "1": "flash1", "2": "flash2"}
        return "best" if given[1] else releases.get(given[2], "best")
    # cuDNN's kernels are not deterministic.
    return "flash2" if "deterministic" in row.text("note").split() else habits.attention


def is_graphed(row: PublishedRow, framework: Framework) -> bool:
    """Whether a step was one CUDA graph: as its column tells, else by its framework's recipes for
    experts in MXFP8."""
    given = row.text("graphs")
    return given == "1" if given else framework.software.whole_graph and "mx" in row.text("prec")


def _graphed(row: PublishedRow) -> frozenset[Module]:
    """Modules of a layer that were a CUDA graph."""
    words = [word for word in row.text("graphs").split() if word not in ("0", "1")]
    if unknown := [word for word in words if word not in MODULES]:
        known = ", ".join(MODULES)
        raise DataError(f"graphs must be 0, 1 or some of {known}, not {unknown[0]!r}")
    return frozenset(module for module in MODULES if module in words)


def _dispatcher(row: PublishedRow) -> Dispatcher:
    """The token dispatcher of experts: as a column or note says, or else DeepEP if experts span
    nodes."""
    given, degree = row.text("dispatcher"), row.whole("ep") or 1
    for name in DISPATCHERS:
        if given == name:
            return name
    if given:
        raise DataError(f"dispatcher must be one of {', '.join(DISPATCHERS)}, not {given!r}")
    across = degree > cluster_of(row).gpus_per_node
    return "deepep" if across or "deepep" in row.text("note") else "alltoall"


def measured_seconds(row: PublishedRow, layout: Layout) -> float | None:
    """Seconds of a step, from the figure that the row reports; None if it reports none."""
    tokens = layout.config.training.step_tokens
    world = layout.grid.world_size
    step, rate = row.number("step_s"), row.number("tps_gpu")
    tflops, mfu = row.number("tflops"), row.number("mfu")
    if step:
        return step
    if rate:
        return tokens / rate / world
    if tflops is None and mfu is not None:
        tflops = mfu / 100 * cluster_of(row).gpu.peak.bf16 / _TERA
    return None if tflops is None else _flops(row, layout) * tokens / (tflops * _TERA * world)


def measured_bytes(row: PublishedRow) -> float | None:
    """Peak memory in bytes, as the framework reports it; None if it was not published."""
    held, unit = row.number("mem"), row.text("mem_unit")
    if held is None:
        return None
    scale = {"gib": 2.0**30, "mib": 2.0**20, "mb": 1e6, "bytes": 1.0, "b": 1.0}
    scale["gb"] = frameworks_of(row)[0].gigabyte
    first = unit.partition(" ")[0]
    if first not in scale:
        raise DataError(f"mem_unit {unit!r} does not begin with one of {', '.join(scale)}")
    return held * scale[first]


def ran_out_of_memory(row: PublishedRow) -> bool:
    """Whether the run ran out of memory: its memory is given as "OOM"."""
    return row.text("mem") == OUT_OF_MEMORY


def _flops(row: PublishedRow, layout: Layout) -> float:
    """FLOPs per token as the source counts them."""
    model, length = layout.config.model, layout.config.training.seq_length
    if row.text("flops_conv") == "hfu96":
        # 96 B s l h^2 (1 + s/6h + V/16lh), recomputation included: Narayanan et al. (2021).
        h, layers = model.hidden_size, model.num_layers
        return 96 * layers * h * h * (1 + length / (6 * h) + model.vocab_size / (16 * layers * h))
    # NeMo's published tokens and FLOP/s agree with attention counted in full, Megatron's with half.
    whole = frameworks_of(row)[0].whole_attention
    return training_flops(model, length, causal=not whole).total


@dataclass(frozen=True)
class Choice:
    """One configuration that a row may mean.

    Attributes:
        layout: the checked layout.
        complete: whether no important setting had to be guessed.
        framework: framework that the run is taken to be of.
    """

    layout: Layout
    complete: bool
    framework: Framework


def row_layouts(row: PublishedRow) -> tuple[Choice, ...]:
    """Every configuration that a row may mean, of every framework that it can be of.

    Raises:
        FivefoldError: there is none, because a setting is missing or settings contradict.
    """
    found: list[Choice] = []
    problem: FivefoldError | None = None
    for framework in frameworks_of(row):
        try:
            found += _of_framework(row, framework)
        except FivefoldError as error:
            problem = problem or error
    if not found:
        raise problem or DataError("nothing fits")
    return tuple(found)


def _of_framework(row: PublishedRow, framework: Framework) -> list[Choice]:
    """Every configuration that a row may mean within one framework."""
    model = model_of(row, drops_scores=software_of(row, framework).attention == "scores")
    world, batch, length = row.whole("ngpu"), row.whole("gbs"), row.whole("seq")
    if not (world and batch and length):
        raise DataError("no GPUs, global batch or sequence length")
    _check_ranks(row, world)
    settings = _parallel(row, model, framework) | _precision(row, framework)
    model = replace(model, max_position_embeddings=max(model.max_position_embeddings, length))
    plain = Config(model).with_values(global_batch_size=batch, seq_length=length, **settings)
    open_choices = list(_open(row, plain, world, framework))
    complete = len(open_choices) == 1
    found, problem = [], None
    for changes in open_choices:
        try:
            config = plain.with_values(**changes)
            found.append(_layout(config, world, framework.divide))
        except ConfigError as error:
            problem = error
    if not found:
        raise problem or DataError("nothing fits")
    return [Choice(layout, complete, framework) for layout in found]


def _check_ranks(row: PublishedRow, world: int) -> None:
    """Check that degrees which are all given multiply to the number of GPUs."""
    degrees = [row.whole(axis) for axis in ("tp", "pp", "cp", "dp")]
    known = prod(degree or 1 for degree in degrees)
    if degrees[-1] and known != world:
        raise DataError(f"tp x pp x cp x dp = {known}, not {world}")


def _layout(config: Config, world: int, divides: Callable[[Config, int], str] | None) -> Layout:
    """The checked layout; stages are balanced if layers do not divide, or if `divides` does it."""
    parallel = config.parallel
    pp = parallel.pipeline_model_parallel_size
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    attempts: list[dict[str, Any]] = [{}, dict.fromkeys(ends, True)]
    if pp > 1:
        stages = pp * (parallel.num_virtual_stages_per_pipeline_rank or 1)
        balanced = {
            "num_virtual_stages_per_pipeline_rank": None,
            "pipeline_model_parallel_layout": (divides or balanced_layout)(config, stages),
        }
        attempts.insert(0 if divides else len(attempts), balanced)
    error: FivefoldError | None = None
    for changes in attempts:
        try:
            return check(config.with_values(**changes), world, planned=True)
        except ConfigError as problem:
            error = error or problem
    assert error is not None
    raise error


def _parallel(row: PublishedRow, model: ModelConfig, framework: Framework) -> dict[str, Any]:
    note = row.text("note")
    tp, pp, cp = (row.whole(axis) or 1 for axis in ("tp", "pp", "cp"))
    sequence = tp > 1 and _switch(row, "sp", framework.sequence_parallel)
    strategy = _strategy(row, framework)
    fused = framework.fused_loss or (framework.compiles_loss and "eager" not in note.split())
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "sequence_parallel": sequence,
        "tp_comm_overlap": tp > 1 and ("async" in note or framework.overlaps_tp),
        "data_parallel_sharding_strategy": strategy.name,
        "cross_entropy_loss_fusion": _switch(row, "fused_loss", fused),
        **_overlaps(row, framework, strategy.zero_stage),
        **(framework.settings if cp > 1 else {}),
    }
    if model.num_experts:
        settings |= _expert_settings(row, framework)
    if replicas := _REPLICAS.fullmatch(row.text("zero")):
        settings["num_distributed_optimizer_instances"] = int(replicas[2])
    return settings


# ZeRO-1, -2 or -3 within some ranks, so many times.
_REPLICAS = re.compile(r"(?:hsdp\s*|(?:fsdp|[123])\s+)(\d{1,7})x(\d{1,7})")


def _switch(row: PublishedRow, column: str, otherwise: bool) -> bool:
    """The meaning of a column of 0 and 1; `otherwise` where it is empty."""
    given = row.whole(column)
    return otherwise if given is None else bool(given)


def _overlaps(row: PublishedRow, framework: Framework, stage: int) -> dict[str, bool]:
    """Whether data-parallel messages of a ZeRO stage run beside the backward and the forward."""
    beside = framework.overlaps
    reduces = {0: "replicas" in beside, 1: "shards" in beside}.get(stage, True)
    return {
        "overlap_grad_reduce": _switch(row, "overlap", reduces),
        "overlap_param_gather": _switch(row, "overlap", "gather" in beside),
    }


def _expert_settings(row: PublishedRow, framework: Framework) -> dict[str, Any]:
    runs_again = row.text("recomp").startswith("full")
    pairs = "1f1b overlap" in row.text("note") or (is_graphed(row, framework) and not runs_again)
    settings: dict[str, Any] = {
        "expert_model_parallel_size": row.whole("ep") or 1,
        "expert_tensor_parallel_size": row.whole("etp") or 1,
        "moe_token_dispatcher_type": "alltoall" if _dispatcher(row) == "alltoall" else "flex",
        "overlap_moe_expert_parallel_comm": _switch(row, "ep_overlap", pairs),
        **framework.expert_settings,
    }
    # Pairs that hide messages also delay weight gradients.
    settings["delay_wgrad_compute"] = settings["overlap_moe_expert_parallel_comm"]
    return settings


def _strategy(row: PublishedRow, framework: Framework) -> Sharding:
    zero = row.text("zero").partition(" ")[0]
    if not zero:
        zero = str(framework.shards)
    elif zero == "hsdp" and not _REPLICAS.fullmatch(row.text("zero")):
        raise DataError("zero: HSDP needs its ranks and their replicas, such as HSDP 8x16")
    elif re.match("fsdp|hsdp", zero):
        zero = "3"
    for sharding in SHARDING.values():
        if zero == str(sharding.zero_stage):
            return sharding
    raise DataError(f"zero must be 0 to 3, FSDP or HSDP, not {zero!r}")


def _precision(row: PublishedRow, framework: Framework) -> dict[str, Any]:
    kind = row.text("prec")
    if "fp4" in kind:
        return {"fp4_format": "e2m1"}
    if kind in ("", "bf16", "fp16"):
        return {}
    if "fp8" not in kind:
        raise DataError(f"prec must be bf16, fp16, or some fp8 or fp4, not {kind!r}")
    recipes = {
        "row": "rowwise",
        "tensor": "tensorwise",
        "(cs)": "tensorwise",
        "-cs": "tensorwise",
        "mx": "mxfp8",
        "block": "blockwise",
    }
    marked = (name for mark, name in recipes.items() if mark in kind)
    recipe = next(marked, framework.fp8_recipe)
    return {"fp8_format": "hybrid", "fp8_recipe": recipe}


def _open(
    row: PublishedRow, config: Config, world: int, framework: Framework
) -> Iterator[dict[str, Any]]:
    """Every combination of the settings that the row does not give."""
    parallel = config.parallel
    pp = parallel.pipeline_model_parallel_size
    dp = world // (parallel.tensor_model_parallel_size * pp * parallel.context_parallel_size) or 1
    each = max(config.training.global_batch_size // dp, 1)
    given = row.whole("mbs")
    if not given and pp > 1 and framework.microbatch_a_rank:
        given = max(each // pp, 1)
    sizes = [given] if given else [b for b in (1, 2, 4, 8) if each % b == 0]
    for size in sizes:
        for virtual in _virtual(row, config.model.num_layers, pp):
            for recompute in ways_to_recompute(row, config.model, framework):
                yield {
                    "micro_batch_size": size,
                    "num_virtual_stages_per_pipeline_rank": virtual if virtual > 1 else None,
                    **recompute,
                }


def _virtual(row: PublishedRow, layers: int, pp: int) -> list[int]:
    """Possible stages per rank; all that divide, if the row gives no micro-batch size either."""
    given = row.whole("vpp")
    if pp == 1 or given:
        return [given or 1]
    if row.whole("mbs") or NOT_PUBLISHED in row.cells["vpp"].lower():  # there are no more
        return [1]
    if "interleaved" in row.text("note"):
        return [2]
    even = [v for v in range(1, 25) if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0]
    return even or [1]
