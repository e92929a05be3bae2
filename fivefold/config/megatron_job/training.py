"""Translates layout, training and data of a Megatron-LM job into settings."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from fivefold.config.by_layer import IN_BF16
from fivefold.config.data import FIM_TOKENS, MOCK
from fivefold.config.megatron_job.arguments import MegatronJob, lost_argument
from fivefold.config.megatron_job.model import needed
from fivefold.config.translation import Named
from fivefold.errors import Mistakes

_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "torch.float32": "fp32",
        "torch.bfloat16": "bf16",
        "torch.float16": "fp16",
        "torch.uint8": "fp8",
    }
)
_SPLITS = ("tensor_model", "pipeline_model", "context")
"""What leaves the ranks of a job for data parallelism."""
_RECOMPUTED_FROM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layernorm": ("qkv_linear",),
        "mla_up_proj": ("core_attn", "attn_proj"),
        "moe": ("expert_fc1", "moe_act"),
    }
)
"""Recomputed module -> offloaded modules whose inputs it recomputes."""
_FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "load": "--load goes on from its distributed checkpoints; with --finetune, weights alone",
        "save": "--save names a run folder of Fivefold's own",
    }
)


def of_parallel(job: MegatronJob, lost: list[str]) -> Named:
    """Degrees, pipeline stages, and what data-parallel ranks share."""
    yield from job.same("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tp, cp = job["tensor_model_parallel_size"], job["context_parallel_size"]
    yield "sequence_parallel", job["sequence_parallel"] and tp > 1
    yield "tp_comm_overlap", job["tp_comm_overlap"] and job["sequence_parallel"] and tp > 1
    yield "context_parallel_size", cp
    if cp > 1:
        yield "cp_comm_type", job["cp_comm_type"] or ["p2p"]
        yield "hierarchical_context_parallel_sizes", job["hierarchical_context_parallel_sizes"]
    if job["pipeline_model_parallel_size"] > 1:
        yield from _pipeline(job)
    yield from _sharding(job, lost)
    yield from job.same("distributed_timeout_minutes", "num_distributed_optimizer_instances")
    if job["use_tp_pp_dp_mapping"]:
        lost.append(lost_argument("use_tp_pp_dp_mapping", True))


def _pipeline(job: MegatronJob) -> Named:
    layout = job["pipeline_model_parallel_layout"]
    if layout is not None:
        yield "pipeline_model_parallel_layout", layout
        job.mention("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    else:
        yield from job.same("num_layers_per_virtual_pipeline_stage")
        yield from job.same("num_virtual_stages_per_pipeline_rank")
        ends = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
        yield from job.same(*ends, "decoder_first_pipeline_num_layers")
        yield from job.same("decoder_last_pipeline_num_layers")
    group = job["microbatch_group_size_per_vp_stage"]
    if group is not None and group != job["pipeline_model_parallel_size"]:
        yield "microbatch_group_size_per_virtual_pipeline_stage", group


def _sharding(job: MegatronJob, lost: list[str]) -> Named:
    if job["use_megatron_fsdp"]:
        strategy = job["data_parallel_sharding_strategy"]
    elif job["use_torch_fsdp2"]:
        again = job["torch_fsdp2_reshard_after_forward"]
        strategy = "optim_grads_params" if again else "optim_grads"
    else:
        shares = job["use_distributed_optimizer"] or job["optimizer"] == "dist_muon"
        strategy = "optim" if shares else "no_shard"
    job.mention("data_parallel_sharding_strategy", "torch_fsdp2_reshard_after_forward")
    job.mention("use_distributed_optimizer")
    yield "data_parallel_sharding_strategy", strategy
    yield from job.same("overlap_grad_reduce", "grad_reduce_in_bf16", "ddp_bucket_size")
    yield from job.same("ddp_reduce_scatter_with_fp32_accumulation")
    if strategy != "no_shard":
        yield "overlap_param_gather", job["overlap_param_gather"]
        yield from job.same("overlap_param_gather_with_optimizer_step", "fp8_param_gather")
    hashes = "check_weight_hash_across_dp_replicas_interval"
    if strategy == "no_shard":
        yield from job.same(hashes)
    elif job[hashes]:
        lost.append(f"{hashes} = {job[hashes]}: {strategy} keeps each weight once between steps")


def of_memory(job: MegatronJob, lost: list[str]) -> Named:
    """Recomputation, offloading, types of optimizer state, graphs."""
    granularity = job["recompute_granularity"] or (
        "selective" if job["recompute_activations"] else None
    )
    yield "recompute_granularity", granularity
    if granularity == "full":
        yield from job.same("recompute_method", "recompute_num_layers")
    elif granularity == "selective":
        yield from job.same("recompute_modules")
    job.mention("recompute_method", "recompute_num_layers", "recompute_modules")
    if job["fine_grained_activation_offloading"]:
        again = job.listed("recompute_modules") if granularity == "selective" else []
        moved = _moved(job.listed("offload_modules"), again, lost)
        wide = 2 if job["bf16"] or job["fp16"] else 4  # its code counts elements
        least = job["min_offloaded_tensor_size"] * wide
        if moved:
            yield "fine_grained_activation_offloading", True
            yield from (("offload_modules", moved), ("min_offloaded_tensor_size", least))
    if job["cross_entropy_loss_fusion"]:
        yield from job.same("cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
    if job["optimizer_cpu_offload"]:
        yield from job.same("optimizer_cpu_offload", "optimizer_offload_fraction")
    of_state = "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"
    types = {name: _TYPES.get(str(job[name]), str(job[name])) for name in of_state}
    if job["use_precision_aware_optimizer"] and set(types.values()) != {"fp32"}:
        yield "use_precision_aware_optimizer", True
        yield from types.items()
    graphs, scope = job["cuda_graph_impl"], job.listed("cuda_graph_scope")
    if graphs == "local" and "full_iteration" in scope:
        yield "cuda_graph_impl", graphs
    elif graphs not in (None, "none"):
        of = f"cuda_graph_impl = {graphs}" + "".join(f", {part}" for part in scope)
        lost.append(f"{of}: graphs of parts; here a graph is a whole step")


def _moved(modules: Sequence[str], again: Sequence[str], lost: list[str]) -> list[str]:
    """Offloaded modules, without those whose inputs are recomputed: Megatron-LM moves them although
    nobody reads them."""
    for module, wasted in _RECOMPUTED_FROM.items():
        found = [name for name in modules if name in wasted and module in again]
        if found:
            modules = [name for name in modules if name not in found]
            lost.append(
                f"offload_modules {' '.join(found)}: recompute_modules {module} recomputes "
                "what they would move"
            )
    return [*modules]


def of_formats(job: MegatronJob) -> Named:
    """The number of bits in which it computes."""
    yield "precision", "bf16" if job["bf16"] else "fp16" if job["fp16"] else "fp32"
    if job["fp16"]:
        names = "initial_loss_scale", "min_loss_scale", "hysteresis"
        by_trial = (*job.same(*names), ("loss_scale_window", int(job["loss_scale_window"])))
        yield from job.same("loss_scale") if job["loss_scale"] else by_trial
    if job["fp8"]:
        yield "fp8_format", job["fp8"]
        yield from job.same("fp8_recipe")
        if job["fp8_recipe"] == "delayed":
            yield from job.same("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
    if job["fp4"]:
        yield "fp4_format", job["fp4"]
    if (job["fp8"] or job["fp4"]) and job["first_last_layers_bf16"]:
        yield from _in_bf16(job)
    yield from job.same("gradient_accumulation_fusion", "deterministic_mode")
    job.mention("accumulate_allreduce_grads_in_fp32")


def _in_bf16(job: MegatronJob) -> Named:
    """The layers that keep bf16, if any do."""
    _, *numbers = IN_BF16
    if any(job[name] for name in numbers):
        yield from job.same(*IN_BF16)


def of_training(job: MegatronJob, mistakes: Mistakes, lost: list[str]) -> Named:
    """Batches, durations, evaluations, checks and logs."""
    yield "micro_batch_size", job["micro_batch_size"]
    batch = job["global_batch_size"]
    if batch is None and job.ranks and job["micro_batch_size"]:
        splits = (job[f"{kind}_parallel_size"] for kind in _SPLITS)
        batch = job["micro_batch_size"] * (job.ranks // prod(splits))
    yield "global_batch_size", batch
    yield from needed(job, "seq_length", mistakes, "encoder_seq_length")
    yield from job.same("rampup_batch_size")
    counted = "samples" if job["train_samples"] else "iters"
    yield from job.same(f"train_{counted}", "exit_duration_in_mins", "exit_interval")
    yield "iterations_to_skip", job.listed("iterations_to_skip")
    if job["eval_interval"] and job["eval_iters"]:
        yield from job.same("eval_interval", "eval_iters", "full_validation")
    job.mention("eval_interval", "eval_iters")
    yield from job.same("manual_gc", "check_for_nan_in_loss_and_grad", "check_for_spiky_loss")
    if job["manual_gc"]:
        yield from job.same("manual_gc_interval")
    yield from job.same("log_interval", "log_straggler", "wandb_project", "profile")
    yield "tensorboard", job["tensorboard_dir"] is not None
    if job["profile"]:
        yield from job.same("profile_step_start", "profile_step_end", "profile_ranks")
        yield from job.same("use_pytorch_profiler", "record_memory_history")
    if not job["calculate_per_token_loss"]:
        lost.append(
            "calculate_per_token_loss is off: it averages each microbatch first, and here every "
            "token of the global batch weighs the same"
        )
    yield from job.same("save_interval", "async_save")
    if job["save_retain_interval"]:
        yield from job.same("save_retain_interval")
        yield "keep_latest_k", 1  # beside those, it keeps the latest
    if job.given.get("non_persistent_ckpt_type") == "local" and job["non_persistent_save_interval"]:
        job.mention("non_persistent_ckpt_type")
        yield from job.same("non_persistent_save_interval", "non_persistent_local_ckpt_dir")
        if job["replication"]:
            yield from job.same("replication_jump")


def of_optimizer(job: MegatronJob, lost: list[str]) -> Named:
    """The optimizer, its rates and its weight decay."""
    kind = "muon" if job["optimizer"] == "dist_muon" else job["optimizer"]
    yield "optimizer", kind
    if kind == "muon":
        yield from job.same("muon_momentum", "muon_num_ns_steps", "muon_scale_mode")
        yield from job.same("muon_extra_scale_factor")
        yield "muon_nesterov", job["muon_use_nesterov"]
        if job["tensor_model_parallel_size"] > 1 and job["muon_tp_mode"] == "blockwise":
            lost.append(lost_argument("muon_tp_mode", "blockwise"))
    else:
        job.mention("muon_tp_mode")
    yield from job.same("lr", "min_lr", "lr_decay_style", "clip_grad")
    if job["qk_clip"]:
        yield from job.same("qk_clip", "qk_clip_alpha", "qk_clip_threshold")
        if job["mtp_num_layers"]:
            lost.append(
                "qk_clip: it clips no head of multi-token prediction, and here all are clipped"
            )
    yield from job.same("log_max_attention_logit")
    yield from job.same("decoupled_lr")
    if job["decoupled_lr"] is not None and job["lr_decay_style"] != "constant":
        yield from job.same("decoupled_min_lr")
    if job["weight_decay_incr_style"] == "constant":
        yield from job.same("weight_decay")
        job.mention("start_weight_decay", "end_weight_decay")
    else:
        yield from job.same("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
        job.mention("weight_decay")
    yield from job.same("adam_beta1", "adam_beta2", "adam_eps")
    counted = "samples" if job["train_samples"] else "iters"
    decay = job[f"lr_decay_{counted}"]
    yield f"lr_decay_{counted}", decay
    share = job["lr_warmup_fraction"]
    steps = decay or job[f"train_{counted}"]
    warmup = job[f"lr_warmup_{counted}"] if share is None else int(share * (steps or 0))
    yield f"lr_warmup_{counted}", warmup
    yield from job.same("lr_warmup_init")
    if job["lr_decay_style"] == "WSD":
        yield from job.same(f"lr_wsd_decay_{counted}", "lr_wsd_decay_style")
    if job["apply_wd_to_qk_layernorm"] and job["qk_layernorm"]:
        lost.append(lost_argument("apply_wd_to_qk_layernorm", True))


def of_data(job: MegatronJob, lost: list[str]) -> Named:
    """Corpora, tokenizer, masks, and folders that the user has to name."""
    yield from job.same("reset_position_ids", "reset_attention_mask", "sft")
    if not job["sft"]:  # which has a loss on answers, and on the ends of these
        yield from job.same("eod_mask_loss")
    job.mention("eod_mask_loss")
    yield from job.same("data_cache_path")
    if job.given.get("dataloader_type") == "single":  # what it is if nothing is said
        job.mention("dataloader_type")
    if job["mock_data"]:
        yield "data_path", [MOCK]
    elif job["train_data_path"]:
        yield "data_path", job["train_data_path"]
        yield "split", "1"
        sets = job["valid_data_path"] or []
        yield "valid_data_path", [f"valid{n}={path}" for n, path in enumerate(sets)]
    else:
        yield from job.same("data_path")
    if not job["train_data_path"]:
        yield "split", job["split"] and str(job["split"]).strip("'\"")
    yield from _tokenizer(job, lost)
    yield from _infilling(job, lost)
    job.mention("finetune")
    if job["moe_use_upcycling"]:
        parts = job["moe_upcycling_granularity"]
        flags = f"--moe-use-upcycling --moe-upcycling-granularity {parts} --load FOLDER"
        lost.append(f"moe_use_upcycling: {flags} starts from the dense model in a folder")
    for name in ("load", "save"):
        if job[name] is not None:
            lost.append(f"{name} = {job[name]}: {_FOLDERS[name]}")


def _infilling(job: MegatronJob, lost: list[str]) -> Named:
    """Documents whose middle comes last. Samples that get shorter are none here, so none is
    padded, and documents end with what the tokenizer has for it."""
    if not job["fim_data"]:
        return
    yield from job.same("fim_data", "fim_rate", "fim_spm_rate", *FIM_TOKENS)
    yield from job.same("fim_split_sample", "fim_no_prefix")
    if job["fim_split_sample"] is not None:
        yield from job.same("fim_fragment_rate")
    job.mention("fim_fragment_rate", "fim_pad_token")
    if job["fim_eod_token"] != "<|endoftext|>":
        lost.append(lost_argument("fim_eod_token", job["fim_eod_token"]))
    job.mention("fim_eod_token")


def _tokenizer(job: MegatronJob, lost: list[str]) -> Named:
    """The file of its tokenizer, if Fivefold makes the same tokens from it."""
    model, kind = job["tokenizer_model"], job["tokenizer_type"]
    if job["vocab_file"]:
        kind = kind or "GPT2BPETokenizer"  # pretrain_gpt.py's default
    if kind == "HuggingFaceTokenizer" and model:
        folder = str(model).removesuffix("/tokenizer.json")
        yield "tokenizer_model", f"{folder}/tokenizer.json"
    elif kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer") and model:
        yield "tokenizer_model", str(model)
    elif kind == "GPT2BPETokenizer" and job["merge_file"] == _beside(job["vocab_file"]):
        yield "tokenizer_model", job["vocab_file"]
    elif kind not in (None, "NullTokenizer"):
        lost.append(
            f"its tokenizer ({kind}): --tokenizer-model wants a tokenizer.json with the same tokens"
        )


def _beside(vocabulary: object) -> str:
    """The merges file that goes with a vocabulary; empty if its name is not of GPT-2's kind."""
    name = str(vocabulary)
    merges = f"{name.removesuffix('vocab.json')}merges.txt"
    return merges if name.endswith("vocab.json") else ""
