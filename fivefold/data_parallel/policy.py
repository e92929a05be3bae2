"""Sharding strategies as settings of FSDP2 or of the bucketed all-reduce.

Bytes sent per step and rank, with d shards, rho = (d-1)/d, g bytes per element of the reduction
dtype, c bytes per element of the compute dtype, Psi parameters and M microbatches:

    no_shard             2 rho g Psi
    optim                rho (g + c) Psi             ZeRO-1
    optim_grads          rho (M g + c) Psi           ZeRO-2
    optim_grads_params   rho M (2c + g) Psi          ZeRO-3
    + HSDP over r        2 (r-1)/r g Psi/d
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fivefold.config.config import Config

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
)
"""Compute types by their names in settings."""


@dataclass(frozen=True)
class Policy:
    """How gradients, parameters and dtypes are handled.

    Attributes:
        shards: whether dp_shard x cp splits at least the optimizer state.
        reshards: whether to free gathered parameters after each forward and backward of a block
            (ZeRO-3, unless the pipeline program says when).
        reduces_every_microbatch: whether to keep no unsharded gradient (ZeRO-2 and ZeRO-3).
        compute_dtype: dtype of activations and gathered parameters.
        master_dtype: dtype of the parameters between steps, or of the masters that are kept for
            them on the host. The optimizer may keep wider ones of 16 bits.
        gradient_dtype: dtype in which gradients are summed and kept.
        wire_dtype: dtype in which gradients are sent.
        sum_dtype: dtype in which sharded gradients are added up.
        bucket_size: elements of gradients in a message of replicated parameters.
        overlap_grad_reduce: whether to reduce during the last backward rather than after it.
        overlap_param_gather: whether to prefetch the next block's parameters.
        gathers_at_start: whether what is gathered once a step is asked for when the step begins,
            while a pipeline's stages wait for each other, not when the first forward needs it.
        quantised_weights: whether weights are gathered as INT8.
        quantised_gradients: whether gradients are reduced as INT4.
        gathers_8_bits: whether weights of 8-bit linear layers are gathered as they are multiplied.
        needs_fsdp: whether FSDP2 gathers weights.
    """

    shards: bool
    reshards: bool
    reduces_every_microbatch: bool
    compute_dtype: torch.dtype
    master_dtype: torch.dtype
    gradient_dtype: torch.dtype
    wire_dtype: torch.dtype
    sum_dtype: torch.dtype
    bucket_size: int
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    gathers_at_start: bool
    quantised_weights: bool
    quantised_gradients: bool
    gathers_8_bits: bool
    needs_fsdp: bool


def make_policy(config: Config) -> Policy:
    """The settings of a sharding strategy, a precision and an optimizer."""
    parallel, training = config.parallel, config.training
    sharding, precision = parallel.sharding, training.precision
    wide = torch.float64 if precision == "fp64" else torch.float32
    gradient = torch.bfloat16 if config.optimizer.narrow_gradients else wide
    master = DTYPES[precision] if config.narrow_weights else wide
    wire = torch.bfloat16 if parallel.grad_reduce_in_bf16 else gradient
    return Policy(
        shards=sharding.splits_optimizer,
        reshards=sharding.splits_parameters and parallel.pipeline_max_unsharded_stages is None,
        reduces_every_microbatch=sharding.splits_gradients,
        compute_dtype=DTYPES[precision],
        master_dtype=master,
        gradient_dtype=gradient,
        wire_dtype=wire,
        sum_dtype=wide if parallel.ddp_reduce_scatter_with_fp32_accumulation else wire,
        bucket_size=parallel.ddp_bucket_size,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        gathers_at_start=parallel.overlap_param_gather
        and sharding.splits_optimizer
        and not sharding.splits_parameters
        and parallel.pipeline_model_parallel_size > 1,
        quantised_weights=parallel.zero_quantized_weights,
        quantised_gradients=parallel.zero_quantized_gradients,
        gathers_8_bits=training.fp8_param_gather,
        needs_fsdp=config.gathers_weights(),
    )
