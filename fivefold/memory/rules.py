"""Validation of memory techniques, alone and in combination; torch-free."""

import os

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig, vocab_split_sizes
from fivefold.errors import Mistakes


def check_techniques(config: Config, mistakes: Mistakes) -> None:
    """Report techniques that contradict each other."""
    _check_recompute(config, mistakes)
    _check_norms(config, mistakes)
    _check_latents(config, mistakes)
    _check_compile(config, mistakes)
    _check_tiles(config, mistakes)
    if config.memory.cross_entropy_loss_fusion:
        with mistakes.collecting():
            vocab_split_sizes(os.environ)


def _check_latents(config: Config, mistakes: Mistakes) -> None:
    """Report recomputation of q, k and v from latents, if other settings keep q, k and v."""
    memory, parallel, moved = config.memory, config.parallel, config.memory.moved_items
    if config.model.is_sparse and "qkv_linear" in moved:
        mistakes.add(
            "offload_modules qkv_linear moves what the indexer of experimental_attention_variant "
            "dsa reads, too, which keeps it on the device",
            works=["--offload-modules core_attn"],
        )
    if "mla_up_proj" not in memory.recomputed_modules:
        return
    others = " ".join(module for module in memory.recompute_modules if module != "mla_up_proj")
    without = f"--recompute-modules {others}" if others else "--recompute-granularity none"
    kinds = [kind for kind in dict.fromkeys(parallel.cp_comm_type) if kind != "p2p"]
    if parallel.context_parallel_size > 1 and kinds:
        mistakes.add(
            f"recompute_modules mla_up_proj saves nothing with cp_comm_type {' '.join(kinds)}, "
            "which keeps the keys and values received from other ranks",
            works=[*([] if config.model.is_sparse else ["--cp-comm-type p2p"]), without],
        )
    elif config.reads_chosen:
        mistakes.add(
            "recompute_modules mla_up_proj saves nothing where attention to chosen tokens reads "
            "their latents (seq_length is many times dsa_indexer_topk): no keys and values are "
            "kept",
            f"seq_length {config.training.seq_length}, topk {config.model.indexer.topk}",
            works=[without],
        )
    if "core_attn" in moved:
        mistakes.add(
            "queries, keys and values cannot be both offloaded (offload_modules core_attn) and "
            "recomputed (recompute_modules mla_up_proj)",
            works=[without],
        )
    if config.model.q_lora_rank is None and "qkv_linear" in moved:
        mistakes.add(
            "recompute_modules mla_up_proj recomputes queries from the norm's output, which "
            "offload_modules qkv_linear moves; with a q_lora_rank they would be recomputed from a "
            "latent",
            works=[without],
        )
    if config.model.q_lora_rank is None and "layernorm" in memory.recompute_modules:
        mistakes.add(
            "recompute_modules mla_up_proj recomputes queries from the norm's output, which "
            "layernorm discards; with a q_lora_rank they would be recomputed from a latent",
            works=["--recompute-modules mla_up_proj"],
        )


def _check_recompute(config: Config, mistakes: Mistakes) -> None:
    memory, slices = config.memory, config.parallel.num_sequence_slices
    if memory.recompute_granularity == "full" and slices > 1:
        mistakes.add(
            "full recomputation would attend to the keys and values of later slices",
            f"num_sequence_slices = {slices}",
            works=["--recompute-granularity selective", "--num-sequence-slices 1"],
        )
    if "layernorm" in memory.recomputed_modules and "qkv_linear" in memory.moved_items:
        mistakes.add(
            "the input of qkv_linear cannot be offloaded, because recompute_modules layernorm "
            "discards it",
            works=["--offload-modules core_attn attn_proj", "--recompute-modules core_attn mlp"],
        )


def _check_norms(config: Config, mistakes: Mistakes) -> None:
    """Report techniques for norms before attention and MLP, if the model has none there."""
    memory, moves = config.memory, config.memory.fine_grained_activation_offloading
    if config.model.parallel_residual_one_norm:
        _check_one_norm(config, mistakes)
    if config.model.moe_branch_norms and moves:
        _check_branch_norms(memory, mistakes)
    if config.model.norms_before:
        return
    none = f"norm_placement {config.model.norm_placement} has no norms before attention and MLP"
    if "layernorm" in memory.recomputed_modules:
        others = [module for module in memory.recompute_modules if module != "layernorm"]
        without = f"--recompute-modules {' '.join(others or ['core_attn'])}"
        mistakes.add(f"{none}, whose outputs recompute_modules layernorm discards", works=[without])
    asked = {*memory.offload_modules} & {"attn_norm", "mlp_norm"} if moves else set()
    if asked:
        mistakes.add(
            f"{none}, whose inputs offload_modules {' '.join(sorted(asked))} moves",
            works=["--offload-modules core_attn attn_proj"],
        )
    if moves and "pre_mlp_layernorm_output" in memory.offload_tensors:
        mistakes.add(
            f"{none}, whose output offload_tensors pre_mlp_layernorm_output moves",
            works=["--offload-tensors none"],
        )


def _check_branch_norms(memory: MemoryConfig, mistakes: Mistakes) -> None:
    """Report offloading of the input or output of the one norm before a mixture, if branches have
    their own norms."""
    several = "moe_branch_norms has a norm for each branch of a mixture, not one"
    if "mlp_norm" in memory.offload_modules:
        mistakes.add(
            f"{several}, whose input offload_modules mlp_norm would move",
            works=["--offload-modules core_attn attn_proj"],
        )
    if "pre_mlp_layernorm_output" in memory.offload_tensors:
        mistakes.add(
            f"{several}, whose output offload_tensors pre_mlp_layernorm_output would move",
            works=["--offload-tensors none"],
        )


def _check_one_norm(config: Config, mistakes: Mistakes) -> None:
    """Report offloading of a norm's input or output if attention and MLP share the norm."""
    memory = config.memory
    if not memory.fine_grained_activation_offloading:
        return
    one = "parallel_residual_one_norm has one norm for attention and MLP"
    asked = {*memory.offload_modules} & {"attn_norm", "mlp_norm"}
    if asked:
        mistakes.add(
            f"{one}, and offload_modules {' '.join(sorted(asked))} tells them apart",
            works=["--offload-modules core_attn attn_proj"],
        )
    if "pre_mlp_layernorm_output" in memory.offload_tensors:
        mistakes.add(
            f"{one}, and offload_tensors pre_mlp_layernorm_output tells them apart",
            works=["--offload-tensors none"],
        )


def _check_tiles(config: Config, mistakes: Mistakes) -> None:
    """Report tiles of dense MLPs in a model without dense MLPs."""
    model, tiles = config.model, config.memory.tiled_mlp_num_shards
    if tiles > 1 and not model.has_dense_layers:
        mistakes.add(
            f"tiled_mlp_num_shards = {tiles} runs dense MLPs in tiles, and every layer of this "
            "model has experts instead",
            works=["--tiled-mlp-num-shards 1"],
        )


def _check_compile(config: Config, mistakes: Mistakes) -> None:
    """Report memory techniques whose hooks would be inside compiled code."""
    memory, hooks, others = config.memory, set[str](), []
    if memory.recompute_granularity == "selective":
        inside = "mlp moe layernorm mla_up_proj a2a_overlap_attn a2a_overlap_post_attn"
        hooks |= {*inside.split()}.intersection(memory.recomputed_modules)
        others += ["--recompute-modules core_attn"] if hooks else []
    if memory.fine_grained_activation_offloading:
        within = {"attn_norm", "mlp_norm", "qkv_linear"}.intersection(memory.offload_modules)
        others += ["--offload-modules core_attn attn_proj"] if within else []
        hooks |= within
    if config.training.compile and memory.tiled_mlp_num_shards > 1:
        mistakes.add(
            f"compiled layers cannot run MLPs in tiles (tiled_mlp_num_shards = "
            f"{memory.tiled_mlp_num_shards}), which are recomputed one by one",
            works=["--no-compile", "--tiled-mlp-num-shards 1"],
        )
    if config.training.compile and hooks:
        mistakes.add(
            f"compiled layers cannot recompute or offload {' '.join(sorted(hooks))}, whose hooks "
            "lie inside the compiled code",
            works=["--no-compile", " ".join(others)],
        )
