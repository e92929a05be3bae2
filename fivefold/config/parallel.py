"""Settings of the layout: degrees of parallelism, sharding, pipeline; under Megatron's names."""

from dataclasses import dataclass
from typing import Literal

from fivefold.config.settings import Count, Whole, option
from fivefold.config.sharding import SHARDING, Sharding, ShardingStrategy

PipelineSchedule = Literal[
    "auto",
    "gpipe",
    "looped_bfs",
    "1f1b",
    "eager_1f1b",
    "sliced_1f1b",
    "interleaved_1f1b",
    "combined_1f1b",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe",
    "dualpipe_v",
    "synthesised",
]
CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
TokenDispatcher = Literal["allgather", "alltoall", "flex"]


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism and what is sharded; -1 infers one degree from the world size."""

    tensor_model_parallel_size: int = option(
        1, "ranks that split every weight matrix by columns or rows (TP)"
    )
    sequence_parallel: bool = option(
        False, "split the norm, dropout and residual regions along the tokens over TP"
    )
    pipeline_model_parallel_size: int = option(1, "ranks that hold consecutive stages (PP)")
    num_virtual_stages_per_pipeline_rank: Count | None = option(
        None, "stages per pipeline rank (V); more than one interleaves them"
    )
    num_layers_per_virtual_pipeline_stage: Count | None = option(
        None, "layers per stage; another way to set V"
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "all stages as a layout string, such as 'Et*2|(tt|)*3tL' ('|' ends a stage), or auto: "
        "stages of equal times, estimated from FLOPs",
    )
    decoder_first_pipeline_num_layers: Whole | None = option(None, "layers on the first PP rank")
    decoder_last_pipeline_num_layers: Whole | None = option(None, "layers on the last PP rank")
    account_for_embedding_in_pipeline_split: bool = option(
        False, "count the embedding as one layer when splitting evenly"
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, "count the head and loss as one layer when splitting evenly"
    )
    pipeline_schedule: PipelineSchedule = option(
        "auto",
        "order of forwards and backwards; auto: 1f1b, interleaved_1f1b when V > 1, combined_1f1b "
        "to hide experts' all-to-alls; synthesised: a schedule found by search for these stages",
    )
    pipeline_dx_first: bool = option(
        True,
        "send each dX before its dW is computed, if the schedule allows it; without it dW "
        "hides the tensor-parallel reduction of dX, but the previous stage waits longer",
    )
    pipeline_in_flight_limit: float | None = option(
        None,
        "most activations that a synthesised schedule may hold on a rank, in microbatches of a "
        "full rank's layers (default: PP, as 1f1b)",
    )
    num_sequence_slices: Count = option(
        1, "causal slices of each sequence, which pass through the pipeline in turn (sliced_1f1b)"
    )
    pipeline_max_unsharded_stages: Count | None = option(
        None,
        "with optim_grads_params: most stages of a rank whose parameters are gathered at once; "
        "each stays gathered as long as possible (default: gather each layer for each use)",
    )
    microbatch_group_size_per_virtual_pipeline_stage: Count | None = option(
        None, "microbatches a rank runs on one stage before the next (default: PP)"
    )
    context_parallel_size: int = option(1, "ranks that split every sequence (CP)")
    cp_comm_type: tuple[CpCommType, ...] = option(
        ("p2p",),
        "how context-parallel ranks exchange keys and values: p2p: in a ring; all_gather; a2a: "
        "heads for tokens (Ulysses); a2a+p2p: Ulysses inside groups and a ring between them; one "
        "for all layers, or one per layer",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (), "for a2a+p2p: sizes of the inner Ulysses group and of the outer ring"
    )
    expert_model_parallel_size: Count = option(1, "ranks that split the experts (EP)")
    expert_tensor_parallel_size: Count = option(1, "ranks that split each expert (ETP)")
    moe_token_dispatcher_type: TokenDispatcher = option(
        "alltoall", "how tokens reach their experts"
    )
    moe_enable_deepep: bool = option(
        False, "send the tokens of flex with DeepEP's kernels (needs GPUs and the package deep_ep)"
    )
    moe_deepep_num_sms: Count = option(
        20, "multiprocessors of a GPU for DeepEP's kernels, an even number"
    )
    moe_shared_expert_overlap: bool = option(
        False, "compute shared experts while tokens travel to the routed ones and back"
    )
    overlap_moe_expert_parallel_comm: bool = option(
        False,
        "hide the experts' all-to-alls behind another microbatch's computation, with schedules "
        "that pair a forward with a backward",
    )
    delay_wgrad_compute: bool = option(
        False,
        "with overlap_moe_expert_parallel_comm: compute weight gradients during the backward's "
        "own all-to-alls",
    )
    tp_comm_overlap: bool = option(
        False,
        "overlap tensor-parallel gathers and scatters with the multiplications that need them; "
        "needs sequence_parallel",
    )
    data_parallel_shard_size: int = option(
        -1, "data-parallel ranks in one sharding group; -1: all ranks that other degrees leave"
    )
    num_distributed_optimizer_instances: int = option(
        1, "replicas of the sharding group (HSDP when more than one)"
    )
    data_parallel_sharding_strategy: ShardingStrategy = option(
        "no_shard",
        "what data-parallel ranks split: nothing; optimizer state (ZeRO-1); also gradients "
        "(ZeRO-2); also parameters (ZeRO-3)",
    )
    overlap_grad_reduce: bool = option(
        True, "reduce gradients while the last backward of a stage still runs"
    )
    overlap_param_gather: bool = option(
        True, "gather the next block's sharded parameters while the current block computes"
    )
    ddp_bucket_size: Count = option(
        2_097_152,
        "with no_shard: gradient elements that are reduced in one message",
    )
    overlap_param_gather_with_optimizer_step: bool = option(
        False,
        "with optim and optim_grads: gather each updated block while others are being updated",
    )
    grad_reduce_in_bf16: bool = option(
        False, "send and sum gradients in bf16; not between HSDP replicas"
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = option(
        False,
        "with grad_reduce_in_bf16: send sharded gradients by all-to-all, and sum them in fp32",
    )
    zero_quantized_weights: bool = option(
        False, "gather sharded weights as INT8 with a scale per block (qwZ of ZeRO++)"
    )
    zero_hpz_partition_size: Count = option(
        1,
        "with optim_grads_params: ranks of a node that keep a second copy of the step's "
        "weights, from which later gathers read (hpZ of ZeRO++)",
    )
    zero_quantized_gradients: bool = option(
        False,
        "reduce sharded gradients as INT4 with a scale per block, by all-to-all (qgZ of ZeRO++)",
    )
    zero_qgz_partition_size: Count = option(
        1,
        "with zero_quantized_gradients: ranks of a node that sum first, before nodes exchange "
        "(qgZ's hierarchy)",
    )

    @property
    def sharding(self) -> Sharding:
        """What data-parallel ranks split, and when they gather and reduce it."""
        return SHARDING[self.data_parallel_sharding_strategy]

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different samples."""
        return self.data_parallel_shard_size * self.num_distributed_optimizer_instances

    def cp_comm_of(self, layer: int) -> CpCommType:
        """How context-parallel ranks exchange the keys and values of a layer."""
        return self.cp_comm_type[layer % len(self.cp_comm_type)]

    @property
    def token_parts(self) -> int:
        """Number of ranks that split the tokens outside heads, MLPs and vocabulary."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1
