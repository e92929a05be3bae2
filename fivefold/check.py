"""Checks a configuration before any process starts; imports no torch.

`check` turns a Config and a number of ranks into a `Layout`: the grid, the stages and the program
that will run. It raises one ConfigError with all mistakes.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from shlex import quote
from typing import Any

from fivefold.batch_rules import (
    check_skipped_steps,
    check_smaller_batches,
    count_microbatches,
)
from fivefold.config.config import SETTINGS, Config
from fivefold.config.foreign import name_of
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.rules.dependence import check_dependents
from fivefold.config.rules.experts import check_routing
from fivefold.config.rules.graph import check_step_graph
from fivefold.config.rules.lora import check_adapted_run
from fivefold.config.rules.memory import check_memory
from fivefold.config.rules.model import check_model
from fivefold.config.rules.optimizer import check_optimizer
from fivefold.config.rules.upcycling import check_upcycling
from fivefold.config.rules.values import check_values
from fivefold.data_parallel.rules import (
    check_blocks,
    check_contradictions,
    check_data_parallel,
    check_replicas,
)
from fivefold.data_parallel.zeropp_rules import HPZ, check_zeropp
from fivefold.errors import ConfigError, Mistakes
from fivefold.expert.rules import check_routers
from fivefold.layout import Layout
from fivefold.memory.rules import check_techniques
from fivefold.mesh.degrees import DEGREES, grid_of, infer_degrees
from fivefold.mesh.rules import (
    check_context,
    check_experts,
    check_tensor_overlap,
    check_tensor_parallel,
)
from fivefold.model.eight_bit.rules import check_eight_bit, check_gathered, check_gathered_by
from fivefold.model.fusion_rules import check_fusions
from fivefold.pipeline.costs.costs import Footprint
from fivefold.pipeline.rules import (
    AUTO,
    check_groups_used,
    check_recomputed_layers,
    check_schedule,
    read_choice,
    resolved_schedule,
)
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape
from fivefold.pipeline.simulate import peak_in_flight
from fivefold.pipeline.split.automatic import automatic_split
from fivefold.pipeline.split.layout import CUTTING, SplitSettings
from fivefold.pipeline.split.stages import Split
from fivefold.units import several


def check(config: Config, world_size: int, *, planned: bool = False) -> Layout:
    """The layout of a configuration on `world_size` ranks.

    Args:
        config: the configuration.
        world_size: number of ranks.
        planned: whether the layout is only planned, so that features which this version cannot
            train with are allowed.

    Raises:
        ConfigError: all mistakes, with the arithmetic and the nearest valid choices.
    """

    def passes(other: Config) -> bool:
        try:
            _check(other, world_size, planned, lambda _: False)
        except ConfigError:
            return False
        return True

    try:
        return _check(config, world_size, planned, passes)
    except ConfigError as error:
        raise error if planned else error.spelled(_built) from error


def _built(choice: str) -> tuple[str, ...]:
    """The choice, unless this version cannot train with it.

    Choices of the model's own settings are kept: another message says that it cannot be trained.
    """
    ways = [row for row in NOT_BUILT if not hasattr(ModelConfig, row[0])]
    off = {name: SETTINGS[name].typed(default) for name, _, default in ways}
    return () if off.get(name_of(choice), choice) != choice else (choice,)


def _check(
    config: Config, world_size: int, planned: bool, passes: Callable[[Config], bool]
) -> Layout:
    """The implementation of `check`; `passes` decides which other configurations may be
    suggested."""
    mistakes = Mistakes()
    check_values(config, mistakes)
    if world_size < 1:
        mistakes.add(f"there must be at least 1 rank, not {world_size}")
    check_model(config.model, mistakes)
    mistakes.raise_if_any()
    check_memory(config.memory, config.model, mistakes)
    check_fusions(config, mistakes)
    parallel = infer_degrees(config, world_size, passes, mistakes)
    check_dependents(_resolved(config, parallel, world_size), mistakes)
    check_adapted_run(config, mistakes)
    check_optimizer(config, mistakes)
    if not planned:
        check_trained(config, parallel, mistakes)
    check_step_graph(config, parallel, mistakes)
    check_tensor_parallel(config, parallel, mistakes)
    check_experts(config, parallel, mistakes)
    check_context(config, parallel, mistakes)
    check_data_parallel(config, parallel, mistakes)
    check_contradictions(config, mistakes)
    check_blocks(config, parallel, mistakes)
    check_gathered(config, mistakes)
    if config.model.num_experts is not None:
        check_routing(config.experts, config.model, mistakes)
        check_upcycling(config, mistakes)
    _check_sequence(config, mistakes)
    check_schedule(config, parallel, mistakes)
    _check_profile(config, world_size, mistakes)
    check_replicas(config, parallel, mistakes)
    split = None
    with mistakes.collecting():
        split = _split(config, parallel)
    if split is not None and not planned:
        check_groups_used(parallel, split.num_virtual, mistakes)
    if split is not None:
        check_recomputed_layers(config.memory, split, mistakes)
    microbatches = count_microbatches(config, parallel, mistakes)
    mistakes.raise_if_any()
    assert split is not None
    schedule = resolved_schedule(parallel, split.num_virtual)
    layout = Layout(
        replace(config, parallel=parallel), grid_of(parallel), split, schedule, microbatches
    )
    check_smaller_batches(layout, mistakes)
    check_skipped_steps(config.training, mistakes)
    try:
        layout.order().program()
    except ConfigError as error:
        raise error.spelled(lambda choice: _as_flags(choice, layout, passes)) from error
    _check_in_flight_limit(layout, mistakes)
    _check_gathers(layout, mistakes)
    check_zeropp(layout.grid, parallel, config.model.num_experts is not None, mistakes)
    check_gathered_by(layout.grid, config, mistakes)
    mistakes.raise_if_any()
    return layout


def _check_gathers(layout: Layout, mistakes: Mistakes) -> None:
    """Report layers that one half of a pair would free while the other half still needs them, and
    copies within a node that no later gather uses."""
    parallel = layout.config.parallel
    if parallel.zero_hpz_partition_size > 1 and layout.gathers_once:
        mistakes.add(
            f"{HPZ} = {parallel.zero_hpz_partition_size} has no effect: with "
            f"pipeline_max_unsharded_stages {parallel.pipeline_max_unsharded_stages} every stage "
            "is gathered once a step",
            works=["--pipeline-max-unsharded-stages none", "--zero-hpz-partition-size 1"],
        )
    if (
        parallel.sharding.splits_parameters
        and parallel.pipeline_max_unsharded_stages is None
        and layout.alternates_within_stages
    ):
        mistakes.add(
            "overlap_moe_expert_parallel_comm alternates a forward and a backward of the same "
            f"stage ({layout.schedule}), which optim_grads_params gathers and frees layer by layer",
            works=[
                "--pipeline-max-unsharded-stages 1",
                "--data-parallel-sharding-strategy optim_grads",
            ],
        )


def _check_in_flight_limit(layout: Layout, mistakes: Mistakes) -> None:
    """Report a limit on held microbatches that no rank reaches."""
    limit = layout.config.memory.recompute_in_flight_limit
    enough = layout.enough_microbatches
    if limit is None or layout.recomputed(enough):
        return
    program = layout.order(enough).program()
    most = round(max(peak_in_flight(program, Footprint(freed_by_b=1.0))))
    mistakes.add(
        f"recompute_in_flight_limit = {limit} has no effect: {layout.schedule} keeps "
        f"{several(most, 'microbatch')} in flight on a rank at most",
        works=[
            *([f"--recompute-in-flight-limit {most - 1}"] if most > 1 else []),
            "--recompute-in-flight-limit none",
        ],
    )


def _as_flags(choice: str, layout: Layout, passes: Callable[[Config], bool]) -> tuple[str, ...]:
    """The flags to suggest for a choice that a schedule offers; other schedules must pass."""
    config, parallel = layout.config, layout.config.parallel
    unit = config.training.micro_batch_size * layout.grid.dp
    kind, value = read_choice(choice)
    match kind:
        case "microbatches":
            return (f"--global-batch-size {int(value) * unit}",)
        case "groups":
            group = f"--microbatch-group-size-per-virtual-pipeline-stage {value}"
            return (f"--global-batch-size {int(value) * unit} {group}",)
        case "slices":
            return (f"--num-sequence-slices {value}",)
        case "cap":
            return (f"--pipeline-in-flight-limit {value}",)
        case "schedule":
            fits = passes(config.with_values(pipeline_schedule=value))
            return (f"--pipeline-schedule {value}",) if fits else ()
        case "shape":
            text = f"{value}:{(parallel.pipeline_model_parallel_layout or '').rpartition(':')[2]}"
            fits = passes(config.with_values(pipeline_model_parallel_layout=text))
            return (f"--pipeline-model-parallel-layout {quote(text)}",) if fits else ()
    return (choice,)


def _resolved(config: Config, parallel: ParallelConfig, world_size: int) -> Config:
    """The configuration with inferred degrees, if the ranks can be split at all."""
    product = prod(getattr(parallel, name) for name in DEGREES.values())
    return replace(config, parallel=parallel) if product == world_size else config


def _split(config: Config, parallel: ParallelConfig) -> Split:
    """The stages; V schedules get a V, by default with two stages per rank."""
    schedule = SCHEDULES.get(parallel.pipeline_schedule)
    in_a_v = schedule is not None and schedule.shape is Shape.V
    cuts = {own: getattr(parallel, name) for name, own in CUTTING.items()}
    said = cuts["virtual"], cuts["layers_per_virtual_stage"]
    if in_a_v and said == (None, None) and cuts["layout"] in (None, AUTO):
        cuts["virtual"] = 2
    if cuts["layout"] == AUTO:
        virtual = 1 if cuts["virtual"] is None else cuts["virtual"]
        return automatic_split(config, parallel, virtual, in_a_v=in_a_v)
    layers, further = config.model.num_layers, config.model.mtp_num_layers
    ranks = parallel.pipeline_model_parallel_size
    settings = SplitSettings(layers, ranks, mtp_num_layers=further, in_a_v=in_a_v, **cuts)
    return settings.split()


def lacking(config: Config) -> int:
    """Number of settings of a complete configuration that the trainer lacks."""
    mistakes = Mistakes()
    check_trained(config, config.parallel, mistakes)
    return mistakes.count


def check_trained(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Refuse settings that can be planned but not trained.

    Args:
        config: configuration that is asked for.
        parallel: its degrees, with every inferred one filled in.
        mistakes: collection to which every mistake is added.
    """
    if config.model.unmodelled:
        mistakes.add(
            f"this description of the model leaves out {', '.join(config.model.unmodelled)}: "
            "Fivefold plans with it, and does not train it"
        )
    check_techniques(config, mistakes)
    check_eight_bit(config, mistakes)
    check_routers(config, mistakes)
    check_tensor_overlap(parallel, mistakes)
    for name, what, default in NOT_BUILT:
        value, setting = config.value(name), SETTINGS[name]
        if value != default:
            mistakes.add(
                f"{name} = {setting.words(value)}: this version of Fivefold plans with {what}, and "
                "does not train with it yet",
                works=[setting.typed(default)],
            )


NOT_BUILT: tuple[tuple[str, str, Any], ...] = (("fp4_format", "4-bit multiplications", None),)


def _check_profile(config: Config, world_size: int, mistakes: Mistakes) -> None:
    logging, steps = config.logging, config.training.num_steps
    count = f"train_{config.training.counted_in}"
    start, end = logging.profile_step_start, logging.profile_step_end
    if not logging.profile:
        return
    if not 1 <= start < end or start > steps:
        mistakes.add(
            f"profile_step_start {start} and profile_step_end {end} name no step of 1 to {steps}",
            f"1 <= start < end, and start <= {steps} ({count}), must hold",
            works=[f"--profile-step-start {steps} --profile-step-end {steps + 1}"],
        )
    for rank in logging.profile_ranks:
        if rank not in range(world_size):
            mistakes.add(
                f"profile_ranks names rank {rank} of {world_size}", works=["--profile-ranks 0"]
            )


def _check_sequence(config: Config, mistakes: Mistakes) -> None:
    model, length = config.model, config.training.seq_length
    learned = model.position_embedding_type == "learned_absolute"
    if learned and length > model.max_position_embeddings:
        mistakes.add(
            f"seq_length {length} exceeds the {model.max_position_embeddings} learned positions",
            works=[
                f"--seq-length {model.max_position_embeddings}",
                f"--max-position-embeddings {length}",
            ],
        )
