"""Trainers of one laboratory each."""

from dataclasses import replace
from types import MappingProxyType

from fivefold.published.frameworks.framework import OTHERS, Framework
from fivefold.published.nanotron import Nanotron, by_weights
from fivefold.published.torchtitan import Torchtitan, TorchtitanCompiledLoss

HAI_LLM: tuple[Framework, ...] = (
    Framework(
        "hai-llm",
        r"hai-?llm",
        fp8_recipe="blockwise",  # as its report describes
        expert_settings=MappingProxyType(  # DualPipe, which hides the all-to-alls
            {"overlap_moe_expert_parallel_comm": True, "pipeline_schedule": "dualpipe"}
        ),
    ),
)
# Fully sharded, without freeing parameters after the forward (Llama 3, section 3.3.2).
META: tuple[Framework, ...] = (Framework("meta", r"\bmeta\b(?!-)"),)
# Every rank of a sharding group broadcasts the parameters that it has updated, whole tensors each,
# and gradients are summed on all ranks in buckets, beside the last backward
# (`broadcast_params`, `_partition_param_list` in its hybrid_zero_optim.py, `reduce_bucket_size` in
# its configs). Norms read `residual.float()`, and run again in the backward of layers that are not
# recomputed (`dropout_selective_checkpoint`).
INTERNLM: tuple[Framework, ...] = (
    Framework(
        "internlm",
        r"intern(lm|evo)",
        software=replace(
            OTHERS,
            attention="flash1",
            casts_norms=True,
            reduces_whole=True,
            bucket=512 * 2**20,
            accumulates_apart="always",
            broadcasts_updates=True,
            gradient_bytes=2.0,
        ),
        sequence_parallel=False,
        overlaps=("replicas", "shards"),
        fused_loss=True,
        recomputes=("layernorm",),
        held=(2.0, 2.0, 4.0, 8.0),
    ),
)
NANOTRON: tuple[Framework, ...] = (
    Framework(
        "nanotron",
        "nanotron",
        software=replace(OTHERS, attention="flash2", by_tensor=True),
        # No hooks on gradients that it shards and sums in fp32; gathers after the optimizer's step.
        overlaps=("replicas",),
        divide=by_weights,
        whole_attention=True,
        gigabyte=2.0**30,
        replay=Nanotron,
    ),
)
_TITAN = replace(
    OTHERS,
    attention="flash2",
    joins_linears=False,
    overlaps_backward_tp=False,
    waits_for_ends=True,
)
# Its loss is compiled again since April 2025, as it was in autumn 2024.
_TITAN_2025 = Framework(
    "torchtitan",
    "",
    (2025, 4),
    _TITAN,
    compiles_loss=True,
    microbatch_a_rank=True,
    whole_attention=True,
    replay=TorchtitanCompiledLoss,
)
TORCHTITAN: tuple[Framework, ...] = (
    Framework(
        "torchtitan",
        "torchtitan",
        software=_TITAN,
        microbatch_a_rank=True,
        whole_attention=True,
        replay=Torchtitan,
    ),
    _TITAN_2025,
    # Its list of kernels begins with cuDNN's on Blackwell (its pull request 1196).
    replace(_TITAN_2025, since=(2025, 5), software=replace(_TITAN, attention="listed")),
)
