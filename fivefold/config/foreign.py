"""Names of settings in other trainers, for suggestions in messages."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fivefold.config.config import SETTINGS
from fivefold.config.megatron_names import MEGATRON_NAMES, ONE_WAY, STEPS
from fivefold.config.settings import name_of_flag

_BATCH = "global_batch_size = micro_batch_size x data-parallel ranks x accumulated microbatches"
_KERNELS = "PyTorch's fused kernels run where they can; there is nothing to choose"
_ZERO = "no_shard, optim (ZeRO-1), optim_grads (ZeRO-2) or optim_grads_params (ZeRO-3, FSDP)"
_OVERLAP = "one switch for gathers and sums, forward and backward"
_LORA = "it gives linear layers adapters; everything else is frozen"
_FULL = "--data-parallel-sharding-strategy optim_grads_params"


@dataclass(frozen=True)
class Foreign:
    """A setting of another trainer.

    Attributes:
        flags: equivalent flags, of which the first one that a command knows is suggested; with a
            value if the value is part of the meaning.
        note: what differs, or why no flag is needed.
    """

    flags: tuple[str, ...]
    note: str = ""

    def meant(self, known: Collection[str]) -> str:
        """The equivalent flag among those that a command knows; empty if there is none."""
        return next((flag for flag in self.flags if name_of(flag) in known), "")


def name_of(flag: str) -> str:
    """'--lr-decay-style cosine' -> 'lr_decay_style'; a switch by its name, on or off."""
    name = name_of_flag(flag)
    return name if name in SETTINGS else name.removeprefix("no_")


def without_section(name: str, known: Collection[str]) -> str:
    """A setting's name without the section that other trainers put before it.

    >>> without_section("checkpoint.interval", ()), without_section("optimizer.lr", ["lr"])
    ('checkpoint_interval', 'lr')
    """
    section, _, own = name.rpartition(".")
    joined = f"{section.rpartition('.')[2]}_{own}"
    return joined if section and (joined in FOREIGN or joined in known) else own


def _table(*rows: tuple[str, str] | tuple[str, str, str]) -> Mapping[str, Foreign]:
    return MappingProxyType(
        {
            name: Foreign(tuple(filter(None, flags.split(" | "))), *note)
            for flags, names, *note in rows
            for name in names.split()
        }
    )


FOREIGN = _table(
    *MEGATRON_NAMES,
    # Degrees and sharding
    ("--tp", "tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree"),
    (
        "--pp | --stages",
        "pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "num_stages",
    ),
    ("--stages", "pp pipeline_model_parallel_size"),
    ("--nproc | --gpus | --stages", "ranks"),
    ("--pipeline-schedule", "pipeline_parallel_schedule pp_schedule"),
    (
        "--cp",
        "cp_size cp_degree context_parallel context_parallel_degree ulysses_degree ring_degree",
    ),
    ("--cp-comm-type p2p", "ring_attention ring"),
    ("--cp-comm-type a2a", "ulysses use_ulysses"),
    ("--ep", "ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree"),
    ("--dp-shard", "dp dp_size data_parallel_size data_parallel_shard_degree fsdp_size"),
    ("--dp-replicate", "data_parallel_replicate_degree hsdp num_replicas"),
    ("--vpp | --chunks", "vp virtual_stages num_model_chunks vpp num_chunks"),
    ("--sequence-parallel", "sp sequence_parallelism"),
    (
        "--tp-comm-overlap",
        "tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad "
        "tp_comm_bulk_wgrad async_tensor_parallel enable_async_tensor_parallel",
        _OVERLAP,
    ),
    (
        "--no-tp-comm-overlap",
        "disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs disable_tp_comm_split_ag "
        "disable_tp_comm_split_rs disable_tp_comm_bulk_dgrad disable_tp_comm_bulk_wgrad",
        _OVERLAP,
    ),
    ("--tp-comm-overlap", "tp_comm_overlap_cfg tp_comm_bootstrap_backend", "nothing to configure"),
    (
        "--data-parallel-sharding-strategy",
        "zero zero_stage zero_optimization sharding_strategy fsdp_sharding_strategy strategy stage",
        _ZERO,
    ),
    (
        "--ddp-bucket-size",
        "ddp_num_buckets reduce_bucket_size allreduce_bucket_size bucket_size bucket_cap_mb",
        "a number of elements",
    ),
    ("--ddp-reduce-scatter-with-fp32-accumulation", "reduce_scatter_with_fp32_accumulation"),
    (_FULL, "fsdp fsdp2 use_fsdp full_shard use_torch_fsdp2 use_megatron_fsdp"),
    ("--data-parallel-sharding-strategy no_shard", "ddp use_ddp"),
    (
        "--nproc | --gpus",
        "nproc_per_node world_size world num_gpus ngpus n_gpus gpus_per_node devices num_devices "
        "num_processes gpus",
    ),
    ("--device cpu", "cpu use_cpu no_cuda"),
    (
        "",
        "nnodes num_nodes num_machines machine_rank node_rank master_addr master_port "
        "main_process_ip main_process_port local_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf "
        "hostfile",
        "torchrun or srun start it on every node: fivefold launch slurm RECIPE --nodes 4 shows how",
    ),
    ("--cluster", "gpu hardware device gpu_type"),
    # Batch, length and duration
    ("--global-batch-size", "batch_size batch bsz train_batch_size total_batch_size"),
    (
        "--global-batch-size",
        "gradient_accumulation_steps grad_accum accumulate_grad_batches",
        _BATCH,
    ),
    ("--microbatches | --global-batch-size", "num_microbatches n_microbatches mb", _BATCH),
    (
        "--micro-batch-size",
        "micro_bsz per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size "
        "per_device_batch_size device_batch_size pipeline_parallel_microbatch_size",
    ),
    (
        "--seq-length",
        "seq_len seqlen sequence_length max_seq_length max_seq_len max_length block_size n_ctx "
        "context_length ctx_len model_max_length encoder_seq_length",
    ),
    ("--train-iters", "steps max_steps num_steps n_steps total_steps iters max_iters iterations"),
    ("--train-iters", "epochs num_epochs num_train_epochs max_epochs", f"{STEPS}, not epochs"),
    ("--train-samples", "train_tokens max_tokens", "samples of --seq-length tokens each"),
    ("--max-tokens", "max_new_tokens num_tokens length n_tokens"),
    ("--step", "ckpt_step checkpoint_step"),
    # Optimizer
    ("--lr", "learning_rate peak_lr max_lr base_lr"),
    ("--min-lr", "lr_min eta_min final_lr end_lr min_learning_rate"),
    ("--lr-warmup-iters", "warmup warmup_steps num_warmup_steps warmup_iters lr_warmup_steps"),
    ("--lr-warmup-iters", "warmup_ratio lr_warmup_fraction", STEPS),
    ("--lr-decay-iters", "decay_steps lr_decay_steps", STEPS),
    ("--lr-decay-style", "scheduler lr_scheduler lr_scheduler_type lr_schedule"),
    ("--weight-decay", "wd decay l2"),
    ("--adam-beta1", "beta1 beta_1 adam_beta_1"),
    ("--adam-beta2", "beta2 beta_2 adam_beta_2"),
    ("--adam-eps", "eps epsilon adam_epsilon"),
    ("--clip-grad", "grad_clip max_grad_norm gradient_clip_val gradient_clipping clip max_norm"),
    ("--optimizer", "optim optimizer_type optimizer_name", "AdamW (adam) or Muon (muon)"),
    (
        "--z-loss-coeff",
        "z_loss z_loss_weight z_loss_multiplier z_loss_alpha logits_z_loss lm_head_z_loss",
        "--moe-z-loss-coeff is that of routers",
    ),
    ("--lora-rank", "peft peft_scheme peft_method use_peft lora use_lora lora_r lora_dim", _LORA),
    ("--lora-target-modules", "target_modules lora_modules"),
    ("--use-dora", "dora", "it is of the adapters of --lora-rank"),
    ("", "init_lora_weights", "A is uniform and B zero, as PEFT has them by default"),
    # Precision
    ("--precision", "dtype torch_dtype mixed_precision param_dtype"),
    ("--fp16", "half float16"),
    ("--initial-loss-scale", "initial_scale_power init_scale", "not its power of two"),
    ("--loss-scale-window", "growth_interval scale_growth_interval"),
    ("--bf16", "bfloat16 amp"),
    ("--fp32", "float32 tf32"),
    ("--fp64", "float64 double"),
    ("--fp8-format", "fp8 fp8_recipe_format"),
    ("", "fp8_interval", "scales follow from their histories after each step"),
    (
        "",
        "tp_only_amax_red reduce_amax no_reduce_amax fp8_amax_reduce",
        "with --fp8-recipe delayed all ranks that multiply with a tensor compare their largest "
        "elements, so that every layout has the scales of one device",
    ),
    (
        "",
        "fp8_wgrad no_fp8_wgrad",
        "linear layers make all three products in 8 bits (--fp8-format)",
    ),
    (
        "--disable-parameter-transpose-cache",
        "keep_fp8_weight_transpose_cache keep_fp8_transpose_cache",
        "weights in 8 bits are kept for all microbatches of a step, unless this is set",
    ),
    (
        "--cuda-graph-impl",
        "enable_cuda_graph external_cuda_graph cuda_graphs use_cuda_graphs",
        "local, with --no-reset-attention-mask: a graph is a whole step, of rows of one document",
    ),
    (
        "",
        "cuda_graph_warmup_steps disable_cuda_graphs",
        "two steps of a form are launched kernel by kernel before it is recorded",
    ),
    (
        "",
        "te_rng_tracker use_te_rng_tracker",
        "dropout's masks are functions of seed and names, and nothing is drawn on the device",
    ),
    ("--moe-grouped-gemm", "moe_group_gemm"),
    (
        "",
        "moe_router_fusion use_transformer_engine_op_fuser fused_single_qkv_rope",
        _KERNELS,
    ),
    # Memory and compilation
    (
        "--recompute-granularity full",
        "gradient_checkpointing activation_checkpointing checkpoint_activations",
    ),
    ("--recompute-granularity selective", "recompute_activations"),
    ("--recompute-granularity", "activation_checkpoint_mode ac_mode recompute"),
    (
        "--recompute-num-layers",
        "custom_recompute_layers_per_stage recompute_num_layers_per_stage",
        "with recompute_method block it takes one number for each stage",
    ),
    (
        "--recompute-in-flight-limit",
        "num_microbatches_with_partial_activation_checkpoints",
        "the microbatch in its backward counts, too, and others repeat their stage as a whole",
    ),
    ("--compile", "torch_compile use_compile"),
    (
        "--optimizer-cpu-offload",
        "cpu_offload offload offload_optimizer offload_optimizer_device zero_offload "
        "optimizer_offload grad_offload",
        "it takes masters, moments, and gradients as they are reduced; --offload-optimizer-states: "
        "updated on the device",
    ),
    (
        "--optimizer-offload-path",
        "nvme_path offload_optimizer_nvme_path nvme_swap_folder",
        "with --optimizer-cpu-offload; masters and moments lie there, gradients in host memory",
    ),
    (
        "--param-offload-path",
        "offload_param_nvme_path",
        "with --param-cpu-offload; weights lie there, and are read ahead of their use",
    ),
    (
        "",
        "buffer_count pipeline_read pipeline_write aio",
        "one bucket is read while another is updated and those before are written: there is "
        "nothing to choose",
    ),
    (
        "--offload-optimizer-states",
        "chunked_optimizer_state_offload",
        "buckets of 4 M elements come to the device, are updated there, and go back",
    ),
    (
        "",
        "offload_optimizer_states_chunk_numel sub_group_size",
        "state off the device is updated in buckets of 4 M elements: there is nothing to choose",
    ),
    (
        "--param-cpu-offload",
        "param_offload offload_param offload_params fsdp_offload_params zero_infinity "
        "zero3_offload enable_cpu_offload offload_policy",
        "with --optimizer-cpu-offload and optim_grads_params; --param-offload-path: on a disk",
    ),
    (
        "",
        "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d",
        "the host always updates with torch's AdamW while copies go on: there is nothing to choose",
    ),
    (
        "",
        "no_pin_cpu_grads no_pin_cpu_params pin_cpu_grads pin_cpu_params",
        "host memory that is copied is always pinned",
    ),
    # Model
    ("--model", "model_name model_name_or_path model_path pretrained hf_model checkpoint_path"),
    ("--num-layers", "n_layer n_layers num_hidden_layers depth layers"),
    ("--hidden-size", "n_embd d_model dim hidden_dim embed_dim embedding_dim model_dim"),
    ("--num-attention-heads", "n_head n_heads num_heads heads"),
    ("--num-query-groups", "n_kv_heads num_kv_heads num_key_value_heads kv_heads"),
    ("--ffn-hidden-size", "intermediate_size d_ff ffn_dim ffn_size mlp_dim ff_dim"),
    ("--kv-channels", "head_dim head_size d_head"),
    ("--vocab-size", "n_vocab padded_vocab_size vocabulary_size"),
    ("--rotary-base", "rope_theta rope_base theta"),
    ("--norm-epsilon", "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps"),
    ("--activation-func", "hidden_act activation act activation_function"),
    ("--window-size", "sliding_window", "sliding_window - 1: it counts the token itself, too"),
    ("--window-size", "attention_window"),
    ("--hidden-dropout", "dropout resid_pdrop"),
    ("--attention-dropout", "attn_pdrop attn_dropout"),
    ("--no-untie-embeddings-and-output-weights", "tie_word_embeddings tie_embeddings"),
    ("--add-qkv-bias", "qkv_bias"),
    ("--add-qkv-bias", "attention_bias", "Llama's attention_bias gives o_proj one, too"),
    ("--moe-router-topk", "num_experts_per_tok top_k_experts top_k topk"),
    ("--num-experts", "num_local_experts n_routed_experts moe_num_experts"),
    # Data
    (
        "--data-path",
        "data dataset dataset_name dataset_path data_dir corpus train_file train_data_path",
    ),
    ("--tokenizer-model", "tokenizer tokenizer_name tokenizer_path tokenizer_type"),
    (
        "--tokenizer-model",
        "vocab_file merge_file",
        "--tokenizer-model is a tokenizer.json, or a vocab.json with a merges.txt beside it",
    ),
    # Runs
    ("--text-key", "text_column text_field"),
    (
        "--save",
        "output output_dir out out_dir save_dir checkpoint_dir checkpoint_folder ckpt_dir run_dir "
        "default_root_dir",
    ),
    ("--load", "resume resume_from_checkpoint resume_from load_checkpoint checkpoint ckpt"),
    ("--save-interval", "save_steps save_every checkpoint_interval ckpt_interval"),
    ("--keep-latest-k", "save_total_limit keep_last max_checkpoints"),
    ("--finetune", "no_load_optim no_load_rng"),
    (
        "--log-interval",
        "logging_steps log_every log_every_n_steps log_freq print_every steps_per_print",
    ),
    (
        "--eval-interval",
        "eval_steps eval_every val_check_interval eval_strategy evaluation_strategy",
    ),
    (
        "--valid-data-path",
        "multiple_validation_sets validation_set_names per_split_data_args_path validation_file "
        "valid_file eval_dataset",
        "each set is NAME=PATH",
    ),
    ("--eval-iters", "limit_val_batches max_eval_batches"),
    ("--profile", "profiler enable_profiling"),
    ("--tensorboard", "tensorboard_dir logging_dir", "events are in the run folder"),
    ("--wandb-project", "wandb use_wandb project report_to"),
    ("", "wandb_exp_name run_name", "a run is called as its folder, which --save names"),
    ("--seed", "random_seed data_seed manual_seed"),
    ("--distributed-timeout-minutes", "timeout ddp_timeout", "in minutes"),
    # Nothing to be said here
    ("", "log_throughput", "the throughput is in every line of the console"),
    (
        "",
        "use_mcore_models transformer_impl use_flash_attn use_flash_attention flash_attn "
        "flash_attention attention_backend attn_implementation attention_softmax_in_fp32",
        _KERNELS,
    ),
    (
        "",
        "accumulate_allreduce_grads_in_fp32",
        "gradients are reduced and accumulated in fp32 unless --grad-reduce-in-bf16 or "
        "--main-grads-dtype",
    ),
    (
        "",
        "ckpt_format auto_detect_ckpt_format use_dist_ckpt dist_ckpt_strictness num_workers "
        "dataloader_num_workers dataloader_type distributed_backend",
        ONE_WAY,
    ),
    (
        "",
        "deepspeed use_deepspeed deepspeed_config",
        "fivefold translate FILE.json --model MODEL writes the recipe of such a file",
    ),
    ("", "accelerate_config", "Fivefold reads no such file"),
    ("", "config config_file recipe", "the recipe is the first word: fivefold train RECIPE.toml"),
)
"""Settings of other trainers by name, with underscores."""
