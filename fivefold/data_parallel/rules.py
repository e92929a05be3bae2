"""Validation of data-parallel settings; torch-free."""

from fivefold.config.config import Config
from fivefold.config.divisors import divisors, nearest
from fivefold.config.memory import MemoryConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.config.sharding import SHARDING
from fivefold.config.training import BLOCK
from fivefold.description.shape import cut_rows
from fivefold.errors import Mistakes
from fivefold.mesh.rules import tensor_parallel_sizes


def check_data_parallel(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Report settings that have no effect with the sharding strategy.

    Args:
        config: configuration that is asked for.
        parallel: its degrees, with every inferred one filled in.
        mistakes: collection to which every mistake is added.
    """
    instances = parallel.num_distributed_optimizer_instances
    replicated = not parallel.sharding.splits_optimizer
    if replicated and config.gathers_weights():
        off = _offload(config.memory)
        precision = config.training.precision
        why = f"of {precision} with {off}, whose gradients FSDP2 sums block by block"
        here = flag_of(f"no_{off}")
        if parallel.grad_reduce_in_bf16:
            mistakes.add(
                f"grad_reduce_in_bf16 has no effect on no_shard {why}: their all-reduce would sum "
                "in bf16",
                works=["--no-grad-reduce-in-bf16", here, "--data-parallel-sharding-strategy optim"],
            )
        usual = ParallelConfig.ddp_bucket_size
        if parallel.ddp_bucket_size != usual:
            mistakes.add(
                f"ddp_bucket_size has no effect on no_shard {why}",
                works=[f"--ddp-bucket-size {usual}", here, "--fp32"],
            )
    if parallel.ddp_reduce_scatter_with_fp32_accumulation and replicated:
        mistakes.add(
            "ddp_reduce_scatter_with_fp32_accumulation has no effect on no_shard: its gradients "
            "are all-reduced",
            works=[
                "--no-ddp-reduce-scatter-with-fp32-accumulation",
                "--data-parallel-sharding-strategy optim",
            ],
        )
    once = parallel.sharding.splits_optimizer and not parallel.sharding.splits_parameters
    if parallel.overlap_param_gather_with_optimizer_step and not once:
        strategy = parallel.data_parallel_sharding_strategy
        why = "gathers nothing" if replicated else "frees each layer again, before the next forward"
        mistakes.add(
            f"overlap_param_gather_with_optimizer_step has no effect on {strategy}, which {why}",
            works=[
                "--no-overlap-param-gather-with-optimizer-step",
                "--data-parallel-sharding-strategy optim",
            ],
        )
    if instances > 1 and replicated:
        mistakes.add(
            f"num_distributed_optimizer_instances = {instances} replicates a sharding group, "
            "and no_shard has none",
            works=[
                f"--data-parallel-sharding-strategy {s}"
                for s, sharding in SHARDING.items()
                if sharding.splits_optimizer
            ],
        )


def check_contradictions(config: Config, mistakes: Mistakes) -> None:
    """Report settings that contradict each other in every layout."""
    parallel, memory = config.parallel, config.memory
    if parallel.zero_quantized_gradients and parallel.grad_reduce_in_bf16:
        mistakes.add(
            "zero_quantized_gradients and grad_reduce_in_bf16 both say how gradients are sent",
            works=["--no-grad-reduce-in-bf16", "--no-zero-quantized-gradients"],
        )
    _check_masters(config, mistakes)
    if config.optimizer.narrow_gradients:
        fp32 = "--main-grads-dtype fp32"
        if parallel.grad_reduce_in_bf16:
            mistakes.add(
                "grad_reduce_in_bf16 has no effect: main_grads_dtype = bf16 sums gradients in "
                "bf16, and sends them as they are",
                works=["--no-grad-reduce-in-bf16", fp32],
            )
        if parallel.zero_quantized_gradients:
            mistakes.add(
                "zero_quantized_gradients and main_grads_dtype = bf16 both say how gradients are "
                "sent",
                works=[fp32, "--no-zero-quantized-gradients"],
            )
    if parallel.overlap_param_gather_with_optimizer_step and memory.optimizer_off_device:
        mistakes.add(
            "overlap_param_gather_with_optimizer_step gathers what the device has updated, while "
            f"{_offload(memory)} still has state on its way from the host",
            works=[
                "--no-overlap-param-gather-with-optimizer-step",
                flag_of(f"no_{_offload(memory)}"),
            ],
        )
    if memory.optimizer_cpu_offload and memory.offload_optimizer_states:
        mistakes.add(
            "optimizer_cpu_offload updates the optimizer's state on the host, and "
            "offload_optimizer_states on the device",
            works=["--no-offload-optimizer-states", "--no-optimizer-cpu-offload"],
        )
    if memory.param_cpu_offload:
        _check_away(config, mistakes)


def _check_masters(config: Config, mistakes: Mistakes) -> None:
    """Report narrow masters that save nothing, or cannot be kept."""
    optimizer, parallel = config.optimizer, config.parallel
    off = "--no-store-param-remainders"
    if optimizer.store_param_remainders and parallel.sharding.splits_optimizer:
        mistakes.add(
            "store_param_remainders saves nothing with "
            f"{parallel.data_parallel_sharding_strategy}, whose weights are gathered from shards",
            "a bf16 shard and its remainder are 2 + 2 bytes, as many as a shard in fp32",
            works=[off, "--data-parallel-sharding-strategy no_shard"],
        )
    if optimizer.store_param_remainders and optimizer.main_params_dtype == "bf16":
        mistakes.add(
            "store_param_remainders keeps masters exact, and main_params_dtype = bf16 keeps none",
            works=[off, "--main-params-dtype fp32"],
        )
    memory = config.memory
    if not memory.optimizer_off_device:
        return
    here = flag_of(f"no_{_offload(memory)}")
    if optimizer.narrow_parameters:
        fp32 = off if optimizer.store_param_remainders else "--main-params-dtype fp32"
        name = "store_param_remainders"
        if optimizer.main_params_dtype == "bf16":
            name = "main_params_dtype = bf16"
        mistakes.add(
            f"{name} updates the weights where they lie, and {_offload(memory)} keeps masters "
            "of others on the host",
            works=[fp32, here],
        )


def keeps_blocks(config: Config, tp: int, etp: int) -> bool:
    """Whether tensor parallelism leaves every block of an 8-bit moment whole.

    Args:
        config: the model, and the types of its moments.
        tp: ranks that split dense parameters.
        etp: ranks that split those of experts.
    """
    if "fp8" not in config.optimizer.moment_types:
        return True
    return not cut_rows(config.model, BLOCK, tp, etp)


def check_blocks(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Report tensor parallelism that cuts a block of an 8-bit moment."""
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    types = ("exp_avg_dtype", "exp_avg_sq_dtype")
    few = [name for name in types if config.value(name) == "fp8"]
    off = " ".join(f"{flag_of(name)} bf16" for name in few)
    for flag, size, other, legal in (
        ("tp", tp, (tp, 1), tensor_parallel_sizes(config.model)),
        ("etp", etp, (1, etp), divisors(config.model.expert_ffn_size)),
    ):
        if size == 1 or keeps_blocks(config, *other):
            continue
        name, (whole, here) = next(iter(cut_rows(config.model, BLOCK, *other).items()))
        fits = [n for n in legal if keeps_blocks(config, *((n, 1) if flag == "tp" else (1, n)))]
        mistakes.add(
            f"{flag} {size} cuts blocks of {BLOCK} elements, which share a scale where "
            f"{' and '.join(few)} = fp8",
            f"rows of {name}: {whole} / {size} = {here}, which is no multiple of {BLOCK}",
            works=[*(f"--{flag} {n}" for n in nearest(size, fits)), off],
        )


def _check_away(config: Config, mistakes: Mistakes) -> None:
    """Report settings that need weights on the device, if weights are off it between gathers."""
    parallel, off = config.parallel, "--no-param-cpu-offload"
    if not parallel.sharding.splits_parameters:
        mistakes.add(
            "param_cpu_offload brings weights to the device layer by layer, and "
            f"{parallel.data_parallel_sharding_strategy} keeps all of them there",
            works=["--data-parallel-sharding-strategy optim_grads_params", off],
        )
    if not config.memory.optimizer_off_device:
        mistakes.add(
            "param_cpu_offload moves weights whose optimizer state has left the device, and the "
            "masters are on the device",
            works=["--optimizer-cpu-offload", "--offload-optimizer-states", off],
        )
    if parallel.zero_hpz_partition_size > 1:
        mistakes.add(
            f"zero_hpz_partition_size = {parallel.zero_hpz_partition_size} keeps a second copy of "
            "the weights on the device, from which param_cpu_offload moves the first",
            works=["--zero-hpz-partition-size 1", off],
        )
    if config.training.check_weight_hash_across_dp_replicas_interval:
        mistakes.add(
            "check_weight_hash_across_dp_replicas_interval compares weights on the device, from "
            "which param_cpu_offload moves them",
            works=[_off("check_weight_hash_across_dp_replicas_interval"), off],
        )


def check_replicas(config: Config, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Report comparisons of replicas if there are no replicas, or if comparisons prove nothing."""
    training, instances = config.training, parallel.num_distributed_optimizer_instances
    replicas = parallel.data_parallel_size
    weights, losses = (
        "check_weight_hash_across_dp_replicas_interval",
        "check_loss_across_dp_replicas_interval",
    )
    if config.logging.log_straggler:
        if replicas == 1:
            mistakes.add(
                "log_straggler compares data-parallel replicas, and there is one",
                works=["--no-log-straggler"],
            )
        elif parallel.sharding.splits_parameters:
            mistakes.add(
                "log_straggler compares the times of replicas, and with optim_grads_params these "
                "wait for each other in every layer",
                works=["--no-log-straggler", "--data-parallel-sharding-strategy optim"],
            )
    if training.check_weight_hash_across_dp_replicas_interval:
        if parallel.sharding.splits_optimizer and instances == 1:
            mistakes.add(
                f"{weights} compares copies of weights that are kept from step to step, and "
                f"{parallel.data_parallel_sharding_strategy} keeps each weight once",
                works=[_off(weights), "--data-parallel-sharding-strategy no_shard"],
            )
        elif replicas * parallel.context_parallel_size == 1:
            mistakes.add(f"{weights} compares replicas, and there is one", works=[_off(weights)])
    if training.check_loss_across_dp_replicas_interval:
        if replicas == 1:
            mistakes.add(f"{losses} compares replicas, and there is one", works=[_off(losses)])
        else:
            _check_alone(losses, parallel, mistakes)


def _check_alone(losses: str, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Report experts that several replicas compute together: each would see the others' tokens."""
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if cp * tp % (ep * etp):
        mistakes.add(
            f"{losses} needs replicas that compute alone, and experts are divided among them",
            f"ep {ep} x etp {etp} = {ep * etp}, and a replica has cp {cp} x tp {tp} = {cp * tp} "
            "ranks of a stage",
            works=[_off(losses)],
        )


def _off(setting: str) -> str:
    return f"{flag_of(setting)} 0"


def _offload(memory: MemoryConfig) -> str:
    """The setting that moves optimizer state off the device."""
    return "optimizer_cpu_offload" if memory.optimizer_cpu_offload else "offload_optimizer_states"
