"""Settings for DeepSpeed: the JSON file that `deepspeed.initialize` takes (checked with 0.19.8)."""

import json
from collections.abc import Iterator
from typing import Any

from fivefold.check import Layout
from fivefold.plan.export.settings import Export

_STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def deepspeed(layout: Layout) -> Export:
    """The file, as far as a layout is not code there."""
    config, training, grid = layout.config, layout.config.training, layout.grid
    optimizer, bf16 = config.optimizer, config.training.precision == "bf16"
    settings: dict[str, Any] = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": optimizer.clip_grad,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": (
            "bf16" if bf16 and config.parallel.grad_reduce_in_bf16 else "fp32"
        ),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
                "eps": optimizer.adam_eps,
                "weight_decay": optimizer.weight_decay,
            },
        },
        "zero_optimization": _sharding(layout),
    }
    if grid.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": grid.tp}
    if grid.cp > 1:
        settings |= {"sequence_parallel_size": grid.cp, "data_parallel_size": grid.dp}
    return Export(json.dumps(settings, indent=2) + "\n", tuple(_missing(layout)))


def _sharding(layout: Layout) -> dict[str, Any]:
    parallel, memory = layout.config.parallel, layout.config.memory
    stage = _STAGES.index(parallel.data_parallel_sharding_strategy)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "overlap_comm": parallel.overlap_grad_reduce,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        }
    if stage and memory.optimizer_cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_optimizer"]["ratio"] = memory.optimizer_offload_fraction
    return zero


def _missing(layout: Layout) -> Iterator[str]:
    grid, memory, training = layout.grid, layout.config.memory, layout.config.training
    strategy = layout.config.parallel.data_parallel_sharding_strategy
    yield f"the model, and its sequence length {training.seq_length}, are code there"
    if grid.pp > 1:
        yield f"pipeline stages are code there: PipelineModule(num_stages={grid.pp})"
        if layout.schedule != "1f1b":
            yield f"DeepSpeed's pipeline runs 1F1B, not {layout.schedule}"
        if strategy in ("optim_grads", "optim_grads_params"):
            yield "its pipeline takes ZeRO stage 0 or 1 only"
    if grid.cp > 1:
        yield f"attention over {grid.cp} ranks is code there: Ulysses, by UlyssesSPAttentionHF"
    if grid.ep > 1:
        yield f"expert parallelism is code there: deepspeed.moe.layer.MoE(ep_size={grid.ep})"
    if grid.tp > 1 and layout.config.parallel.sequence_parallel:
        yield "its tensor parallelism does not split the sequence: activations need more memory"
    if grid.dp_replicate > 1:
        yield f"it shards over all {grid.dp} data-parallel ranks: MiCS, for groups, was removed"
    if memory.recompute_granularity:
        yield "recomputation is code there: deepspeed.checkpointing.checkpoint"
    if memory.fine_grained_activation_offloading:
        yield "activation offloading is code there"
    if memory.optimizer_cpu_offload and strategy == "no_shard":
        yield "an optimizer on the host needs ZeRO stage 1 or more"
    elif (
        memory.optimizer_cpu_offload
        and memory.optimizer_offload_fraction < 1
        and strategy != "optim_grads_params"
    ):
        yield "below ZeRO stage 3 all of the optimizer goes to the host, not a part"
    if training.fp8_format or training.fp4_format:
        yield "multiplications in 8 or 4 bits are code there"
