"""Short descriptions of layouts."""

from collections.abc import Iterator

from fivefold.config.memory import MemoryConfig
from fivefold.layout import Layout
from fivefold.pipeline.split.stages import layout_string
from fivefold.predict.cluster import Cluster
from fivefold.units import human_bandwidth, human_bytes, several


def degrees(layout: Layout) -> str:
    """The degrees of parallelism, such as 'tp 8 pp 16 dp 128'."""
    grid = layout.grid
    sizes = {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "ep": grid.ep, "etp": grid.etp}
    words = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " ".join([*words, f"dp {grid.dp}"])


def machines(cluster: Cluster) -> str:
    """The GPUs, and the links between them if there are several."""
    gpus = f"{cluster.num_gpus:,} x {cluster.gpu.name} ({human_bytes(cluster.gpu.memory_bytes)})"
    inside = human_bandwidth(cluster.node_link.bandwidth)
    if cluster.nodes == 1:
        return gpus if cluster.num_gpus == 1 else f"{gpus} in one node, {inside}"
    between = human_bandwidth(cluster.network_link.bandwidth)
    each = cluster.gpus_per_node
    return f"{gpus}, {cluster.nodes:,} nodes of {each}, {inside} inside, {between} a GPU between"


def summary(layout: Layout) -> str:
    """The chosen settings of a layout in one line, including memory techniques."""
    parallel, training = layout.config.parallel, layout.config.training
    words = [degrees(layout), f"micro-batch {training.micro_batch_size}"]
    if layout.grid.cp > 1:
        words.append(f"cp by {context_words(layout)}")
    if layout.grid.pp > 1:
        virtual = layout.split.num_virtual
        words.append(f"{layout.schedule}" + (f" x {virtual} stages" if virtual > 1 else ""))
        if not parallel.pipeline_dx_first:
            words.append("dX with its dW")
    if layout.overlaps_pairs:
        words.append("experts' messages in pairs")
    strategy = parallel.sharding.paper_name
    if strategy != "-":
        copies = parallel.num_distributed_optimizer_instances
        words.append(strategy + (f" in {copies} groups" if copies > 1 else ""))
    words += memory_words(layout)
    return ", ".join(words)


def parallelism(layout: Layout) -> str:
    """How ranks split a run: '8 ranks: tp 2 + sequence, pp 2 (1f1b, Et|tL), dp 2 (optim), ...'."""
    grid, parallel = layout.grid, layout.config.parallel
    parts = []
    if grid.tp > 1:
        parts.append(f"tp {grid.tp}" + (" + sequence" if parallel.sequence_parallel else ""))
    if grid.cp > 1:
        kinds = ", ".join(dict.fromkeys(parallel.cp_comm_type))
        parts.append(f"cp {grid.cp} ({kinds})")
    if len(layout.split.stages) > 1:
        virtual = f" x {layout.split.num_virtual}" if layout.split.num_virtual > 1 else ""
        stages = layout_string(layout.split.stages)
        parts.append(f"pp {grid.pp}{virtual} ({layout.schedule}, {stages})")
    if grid.dp > 1:
        dp = f"{grid.dp_replicate} x {grid.dp_shard}" if grid.dp_replicate > 1 else str(grid.dp)
        parts.append(f"dp {dp} ({parallel.data_parallel_sharding_strategy})")
    if grid.ep * grid.etp > 1:
        axes = [f"{axis} {grid.size(axis)}" for axis in ("ep", "etp") if grid.size(axis) > 1]
        parts.append(f"{' x '.join(axes)} ({parallel.moe_token_dispatcher_type})")
    parts.append(several(layout.num_microbatches, "microbatch"))
    return f"{several(grid.world_size, 'rank')}: " + ", ".join(parts)


def context_words(layout: Layout) -> str:
    """The kinds of context-parallel communication, such as 'a2a+p2p 8x2'."""
    parallel = layout.config.parallel
    kinds = "/".join(dict.fromkeys(parallel.cp_comm_type))
    sizes = "x".join(map(str, parallel.hierarchical_context_parallel_sizes))
    return f"{kinds} {sizes}".strip()


def recompute_words(memory: MemoryConfig) -> str:
    """A short description of what is recomputed."""
    if memory.recompute_granularity is None:
        return "no recompute"
    what = "full recompute"
    if memory.recompute_granularity == "selective":
        what = f"recompute {' '.join(memory.recompute_modules)}"
    if memory.recompute_method == "block":
        numbers = " ".join(map(str, memory.recompute_num_layers))
        by_stage = "by stage" if " " in numbers else "a stage"
        return f"{what} of {numbers} layers {by_stage}"
    return what


def memory_words(layout: Layout) -> list[str]:
    """Descriptions of the memory techniques, if any are used."""
    memory = layout.config.memory
    words = []
    if memory.recompute_granularity is not None:
        words.append(recompute_words(memory))
    if memory.tiled_mlp_num_shards > 1:
        words.append(f"MLPs in {memory.tiled_mlp_num_shards} tiles")
    if memory.recompute_in_flight_limit is not None:
        words.append(f"recompute beyond {memory.recompute_in_flight_limit} in flight")
    if memory.fine_grained_activation_offloading:
        moved = (*memory.offload_modules, *memory.offload_tensors)
        share = memory.activation_offload_fraction
        part = f"{share:.0%} of " if share < 1 else ""
        words.append(f"offload {part}{' '.join(moved)}")
    if memory.cross_entropy_loss_fusion:
        words.append(f"fused loss ({memory.cross_entropy_fusion_impl})")
    if memory.optimizer_off_device:
        share = memory.optimizer_offload_fraction
        part = f"{share:.0%} of the " if share < 1 else ""
        place = "host" if memory.optimizer_offload_path is None else "disk"
        updated = ", updated on the device" if memory.offload_optimizer_states else ""
        words.append(f"{part}optimizer on the {place}{updated}")
    if memory.param_cpu_offload:
        words.append(f"weights on the {'disk' if memory.param_offload_path else 'host'}")
    optimizer = layout.config.optimizer
    if optimizer.optimizer == "muon":
        words.append("Muon")
    if optimizer.narrow_parameters:
        words.append("remainders of masters" if optimizer.store_param_remainders else "no masters")
    if optimizer.narrow_gradients:
        words.append("gradients in bf16")
    first, second = optimizer.moment_types
    kinds = {"moments": first} if first == second else {"m": first, "v": second}
    words += [f"{moments} in {kind}" for moments, kind in kinds.items() if kind != "fp32"]
    return words


def requirements(layout: Layout) -> Iterator[str]:
    """Features that the layout needs and that not every trainer or machine has."""
    parallel = layout.config.parallel
    if layout.grid.ep > 1 and parallel.moe_token_dispatcher_type == "flex":
        yield (
            "flex sends no token twice to a rank or a node. Megatron-LM and torchtitan need DeepEP "
            "for it, with NVLink inside nodes and RDMA between them; --moe-token-dispatcher-type "
            "alltoall does not need it"
        )
