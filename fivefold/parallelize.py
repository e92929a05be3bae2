"""The one list of techniques: what is installed around the plain model, and in which order."""

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from fivefold.context.install import install_chosen, install_context_parallel
from fivefold.counts.parameters import ParameterRecord, delayed_layers, parameter_records
from fivefold.counts.units import unit_of, units_on_host
from fivefold.data_parallel.fsdp import ShardedStage
from fivefold.data_parallel.policy import Policy, make_policy
from fivefold.data_parallel.replicated import ReplicatedStage
from fivefold.data_parallel.stage_gradients import StageGradients
from fivefold.expert.deepep import Kernels
from fivefold.expert.install import install_experts
from fivefold.layout import Layout
from fivefold.memory.cross_entropy import install_cross_entropy
from fivefold.memory.offload import Host, install_offload
from fivefold.memory.parameters import OffloadedParameters
from fivefold.memory.recompute import install_recompute
from fivefold.mesh.groups import Groups
from fivefold.mesh.slices import give_memory
from fivefold.model.compiled import compile_layers
from fivefold.model.eight_bit.layers import (
    eight_bit,
    install_delayed,
    install_eight_bit,
    keep_weights,
)
from fivefold.model.fusions import install_fusions
from fivefold.model.transformer import Stage
from fivefold.parallel_model import ParallelModel
from fivefold.pipeline.run.executor import Executor
from fivefold.pipeline.run.interleaver import Interleaver
from fivefold.tensor.deferred_weight import DeferredWeights, SumOf
from fivefold.tensor.exchange import TokensInParts, exchange_of
from fivefold.tensor.install import install_deferral, install_ends, install_tensor_parallel

log = logging.getLogger(__name__)


def parallelize(layout: Layout, groups: Groups, device: torch.device) -> ParallelModel:
    """Build this rank's stages and install every technique around them.

    The order matters: tensor parallelism changes what a parameter is, data parallelism shards or
    replicates the result, and memory is allocated only once each rank knows its part.
    """
    config = layout.config
    policy = make_policy(config)
    pp_rank = groups.at["pp"]
    deferred, turns = DeferredWeights(), Interleaver(device)
    # PyTorch's linears add nothing to sums, nor do the ends beside them.
    of_ends = deferred if layout.owns_linears else DeferredWeights()
    records = {record.name: record for record in parameter_records(layout, groups.rank)}
    on_host = _on_host(layout, pp_rank, records)
    stages = _plain_stages(layout, pp_rank, policy, records, on_host)
    _install_tensor(layout, groups, stages, deferred, of_ends, records)
    meanwhile = turns.give_way if layout.overlaps_pairs else None
    _install_experts(layout, groups, stages, deferred, records, meanwhile)
    if groups.cp is not None:
        _install_context(layout, groups, stages)
    if config.model.is_sparse and config.keeps_latents(0):
        _install_chosen(layout, groups, stages)
    _install_eight_bit(layout, policy, stages)
    layers = delayed_layers(layout, groups.rank, records.values())
    scaling = install_delayed(stages, layers, config, device)
    passes = layout.num_microbatches * config.parallel.num_sequence_slices
    shared = keep_weights(stages, config, passes)
    _install_memory(layout, groups, stages, of_ends, device)
    for stage in stages.values():
        install_fusions(stage, config.training)
    if config.training.compile:
        for stage in stages.values():
            compile_layers(stage, config.training.compile_backend)
        log.info("layers compiled with %s", config.training.compile_backend)
    weights_on_host = on_host if config.memory.param_cpu_offload else frozenset()
    gradients = {
        index: _install_data_parallel(
            layout, groups, stage, policy, device, records, weights_on_host
        )
        for index, stage in stages.items()
    }
    offloaded = None
    if weights_on_host:
        blocks = [block for each in gradients.values() for block in each.offloaded()]
        named = dict(kept for stage in stages.values() for kept in stage.named_parameters())
        offloaded = OffloadedParameters(blocks, named, device, config.memory.param_offload_path)
        log.info("weights are copied to the device for their gathers")
    deferred.sums = _sums(layout, gradients.values())
    executor = Executor(
        stages,
        gradients,
        deferred,
        groups.pp,
        layout.hidden_shape,
        policy.compute_dtype,
        device,
        turns,
        delays_weights=config.parallel.delay_wgrad_compute,
        states_into=layout.states_into,
        lines=groups.pp_lines,
    )
    return ParallelModel(
        layout, groups, stages, gradients, records, executor, on_host, scaling, shared, offloaded
    )


def _plain_stages(
    layout: Layout,
    pp_rank: int,
    policy: Policy,
    records: Mapping[str, ParameterRecord],
    on_host: frozenset[str],
) -> dict[int, Stage]:
    """This rank's stages on the meta device, each parameter in the type in which it is kept."""
    config, wide = layout.config, torch.promote_types(policy.master_dtype, torch.float32)
    with torch.device("meta"):
        stages = {
            index: Stage(config.model, parts, config.training, config.experts).to(wide)
            for index, parts in layout.stages_of(pp_rank).items()
        }
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            narrow = name in on_host or not records[name].trained
            if narrow or policy.master_dtype == policy.compute_dtype:
                parameter.data = parameter.data.to(policy.compute_dtype)
    return stages


def _sums(layout: Layout, gradients: Iterable[StageGradients]) -> list[SumOf]:
    """How matrix products accumulate weight gradients, or write those that are sent at once."""
    adds = layout.fuses_accumulation
    if adds:
        log.info("weight gradients of a step are added up by the products that make them")
    return [each.sum_of for each in gradients if adds or isinstance(each, ReplicatedStage)]


def _on_host(
    layout: Layout, pp_rank: int, records: Mapping[str, ParameterRecord]
) -> frozenset[str]:
    """Names of the parameters whose masters and moments are in host memory."""
    units = units_on_host(layout, pp_rank)
    found = frozenset(n for n, record in records.items() if (record.stage, unit_of(n)) in units)
    if found:
        share = f"{len(found)} of {len(records)} parameters"
        log.info("optimizer in host memory: %s, gradients leave as they are reduced", share)
    return found


def _install_tensor(
    layout: Layout,
    groups: Groups,
    stages: dict[int, Stage],
    deferred: DeferredWeights,
    of_ends: DeferredWeights,
    records: dict[str, ParameterRecord],
) -> None:
    parallel = layout.config.parallel
    sequence, overlaps = parallel.sequence_parallel, parallel.tp_comm_overlap
    exchange = exchange_of(groups.tp, sequence_parallel=sequence, overlaps=overlaps)
    dims = {n: record.split_dim for n, record in records.items() if not record.experts}
    for number, stage in stages.items():
        if groups.tp is not None:
            install_tensor_parallel(stage, groups, exchange, deferred, dims)
        elif layout.owns_linears:
            again = layout.memory_of(number).recompute_granularity is not None
            install_deferral(stage, deferred, recomputes=again)
        else:
            install_ends(stage, of_ends)
    if groups.tp is not None:
        log.info("tensor parallel over %d%s", layout.grid.tp, " + sequence" if sequence else "")
    if isinstance(exchange, TokensInParts):
        log.info("tensor parallel: parts of products while others travel, by %s", exchange.by)
    if layout.sends_dx_first:
        log.info("pipeline: dX is sent before dW is computed")


def _install_experts(
    layout: Layout,
    groups: Groups,
    stages: dict[int, Stage],
    deferred: DeferredWeights,
    records: dict[str, ParameterRecord],
    meanwhile: Callable[[], None] | None,
) -> None:
    if groups.experts is None:
        return
    grid, parallel = layout.grid, layout.config.parallel
    kind, overlaps = parallel.moe_token_dispatcher_type, parallel.moe_shared_expert_overlap
    dims = {name: record.split_dim for name, record in records.items() if record.experts}
    kernels, ep = None, groups.experts.ep
    if parallel.moe_enable_deepep and ep is not None:
        kernels = Kernels(ep, parallel.moe_deepep_num_sms)
        log.info("experts' tokens travel by DeepEP, %d SMs", parallel.moe_deepep_num_sms)
    for stage in stages.values():
        install_experts(stage, kind, groups.experts, overlaps, deferred, dims, kernels, meanwhile)
    if grid.ep * grid.etp > 1:
        split = f", each split over {grid.etp}" if grid.etp > 1 else ""
        log.info("experts over %d%s (%s)", grid.ep, split, kind)
    if meanwhile is not None:
        log.info("pairs: a forward and a backward run in turns while experts' messages travel")


def _install_context(layout: Layout, groups: Groups, stages: dict[int, Stage]) -> None:
    kinds = layout.config.parallel.cp_comm_type
    for stage in stages.values():
        install_context_parallel(stage, kinds, groups)
    log.info("context parallel over %d (%s)", layout.grid.cp, ", ".join(dict.fromkeys(kinds)))


def _install_chosen(layout: Layout, groups: Groups, stages: dict[int, Stage]) -> None:
    alone = layout.config.reads_chosen
    for stage in stages.values():
        install_chosen(stage, groups, alone=alone)
    if alone:
        log.info("attention reads the latents of chosen tokens alone")


def _install_eight_bit(layout: Layout, policy: Policy, stages: dict[int, Stage]) -> None:
    products = eight_bit(layout.config.training, policy.compute_dtype)
    if products is None:
        return
    for number, stage in stages.items():
        install_eight_bit(stage, products, layout.memory_of(number))
    training = layout.config.training
    gathered = ", gathered in 8 bits" if training.fp8_param_gather else ""
    log.info("linear layers in fp8: %s, %s%s", training.fp8_format, training.fp8_recipe, gathered)


def _install_memory(
    layout: Layout,
    groups: Groups,
    stages: dict[int, Stage],
    of_ends: DeferredWeights,
    device: torch.device,
) -> None:
    """Install recomputation and offloading, inside the blocks that data parallelism gathers."""
    memory, sequence = layout.config.memory, layout.config.parallel.sequence_parallel
    share = memory.activation_offload_fraction
    host = Host(device, memory.min_offloaded_tensor_size, share)
    for number, stage in stages.items():
        own = layout.memory_of(number)
        if own.recompute_granularity is not None:
            install_recompute(stage, own)
        if own.fine_grained_activation_offloading:
            install_offload(stage, own, host)
        if memory.cross_entropy_loss_fusion and stage.parts.head:
            install_cross_entropy(stage, memory, groups.tp, sequence, of_ends)
    numbers = " ".join(map(str, memory.recompute_num_layers))
    if memory.recomputes_first_layers:
        modules = f", {' '.join(memory.recompute_modules)} of each" * bool(
            memory.recomputed_modules
        )
        log.info("recompute: the first %s layers of a stage%s", numbers, modules)
    elif memory.recompute_granularity == "selective":
        log.info("recompute: %s", ", ".join(memory.recompute_modules))
    elif memory.recompute_granularity == "full":
        log.info("recompute: every layer, %s at a time", numbers)
    if memory.tiled_mlp_num_shards > 1:
        log.info("recomputed MLPs: %d tiles of the tokens", memory.tiled_mlp_num_shards)
    if memory.recompute_in_flight_limit is not None:
        count = memory.recompute_in_flight_limit
        log.info("recompute: whole stages, of all but %d microbatches in flight", count)
    if memory.fine_grained_activation_offloading:
        part = f"{share:.0%} of " if share < 1 else ""
        log.info("to host memory: %swhat %s save", part, ", ".join(memory.moved_items))


def _install_data_parallel(
    layout: Layout,
    groups: Groups,
    stage: Stage,
    policy: Policy,
    device: torch.device,
    records: dict[str, ParameterRecord],
    offloaded: frozenset[str],
) -> StageGradients:
    """Install data parallelism and allocate a stage: with FSDP2 after sharding, so that no rank
    holds it whole.

    `offloaded`: names of parameters whose shards are not kept on the device.
    """
    in_hooks = policy.overlap_grad_reduce
    if policy.needs_fsdp:
        by_hand = layout.alternates_within_stages
        sharded = ShardedStage(stage, groups, policy, reduces_in_hooks=in_hooks, by_hand=by_hand)
        sharded.give_memory(device, offloaded)
        stage.tie()  # memory was given to a tied weight more than once
        return sharded
    for module in stage.modules():
        give_memory(module, device)
    stage.tie()
    sums = {"data": groups.data}
    if groups.experts is not None:
        sums["edp"] = groups.experts.edp
    trained = [name for name, _ in stage.named_parameters() if records[name].trained]
    over = {name: sums[records[name].sums[0]] for name in trained}
    adds = layout.fuses_accumulation
    return ReplicatedStage(stage, over, policy, reduces_in_hooks=in_hooks, adds=adds)
