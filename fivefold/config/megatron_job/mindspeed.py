"""Arguments of MindSpeed-LLM among Megatron-LM's and settings here.

Source: what `mindspeed_llm/features_manager` registers, and the code that reads it. Those that make
another model than any here are mistakes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fivefold.config.layer_pattern import runs
from fivefold.config.megatron_job.described import Described

_CONTEXT: Mapping[str, str] = MappingProxyType(
    {
        "hybrid_cp_algo": "a2a+p2p",
        "kvallgather_cp_algo": "allgather",
        "megatron_cp_algo": "p2p",
        "ulysses_cp_algo": "a2a",
    }
)
_SPECS = "mindspeed_llm.tasks.models.spec."
_PLAIN = ("deepseek_spec", "qwen3_spec")
"""Its layers that are those of Megatron-core, with its own norms."""
_ANOTHER = (
    *("attn_logit_softcapping", "output_logit_softcapping", "query_pre_attn_scalar", "post_norm"),
    *("input_embeds_norm", "interleave_sliding_window", "use_glm_rope", "enable_dsa_indexer"),
    *("full_attention_interval", "num_zero_experts", "n_hash_layers", "scale_emb", "scale_depth"),
    *("dim_model_base", "shared_expert_gate_output_dimension", "swiglu_limit", "enable_mhc"),
    *("moe_device_level_aux_loss_coeff", "moe_comm_aux_loss_coeff", "kv_compress"),
)


def of_mindspeed(job: Described) -> None:
    """Read what MindSpeed-LLM has besides Megatron-LM."""
    for name in _ANOTHER:
        if (value := job.take(name)) is not None:
            job.mistakes.add(f"{name} {value}".rstrip() + ": no model here has that")
    spec = job.given.get("spec")
    module = str(spec[0] if isinstance(spec, list) else spec)
    if module.startswith(_SPECS):
        if (kind := module.removeprefix(_SPECS)) not in _PLAIN:
            job.mistakes.add(f"spec = {module}: which layers {kind} makes is not known here")
        del job.given["spec"]
    _read_experts(job)
    _read_positions(job)
    _read_context(job)
    _read_layers(job)
    if (rank := job.number("lora_r")) is not None:
        modules = (job.take("lora_target_modules") or "").split()
        job.adapt(rank, job.number("lora_alpha") or 32, modules)
    scaling, stage = job.take("is_instruction_dataset") is not None, job.take("stage")
    if stage not in (None, "pt", "sft"):
        job.mistakes.add(f"stage = {stage}: pretraining and conversations are trained here")
    if scaling or stage == "sft":
        job.given |= {"sft": True, "reset_position_ids": True, "reset_attention_mask": True}
        job.notes.append(
            f"prompt_type = {job.take('prompt_type')}: conversations are put together by the "
            "template beside tokenizer_model here"
        )


def _read_experts(job: Described) -> None:
    """Experts whose weights are divided by their sum have a softmax of the chosen, if any."""
    wide = job.given.get("moe_ffn_hidden_size") or job.given.get("ffn_hidden_size")
    shared = job.number("n_shared_experts")
    if shared and wide and not job.given.get("moe_shared_expert_intermediate_size"):
        job.given["moe_shared_expert_intermediate_size"] = int(shared) * int(wide)
    if job.take("shared_expert_gate") is not None:
        job.given["moe_shared_expert_gate"] = True
    if job.take("router_gating_in_fp32") is not None:
        job.given["moe_router_dtype"] = "fp32"
    balances = job.given.get("moe_router_load_balancing_type")
    kind = balances[0] if isinstance(balances, list) and len(balances) == 1 else balances
    whole = job.take("norm_topk_prob") is not None
    softmax = job.given.get("moe_router_score_function", "softmax") == "softmax"
    if kind == "softmax_topk":
        job.given |= {"moe_router_load_balancing_type": "none", "moe_router_pre_softmax": not whole}
        if not softmax:
            job.mistakes.add("softmax_topk chooses by a softmax, whatever else is asked for")
    elif kind == "aux_loss" and whole and softmax:
        job.given |= {"moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": None}


def _read_positions(job: Described) -> None:
    kind, names = job.take("rope_scaling_type"), ("mscale", "mscale_all_dim")
    numbers = {name: job.number(f"rope_scaling_{name}") for name in names}
    before = job.number("rope_scaling_original_max_position_embeddings")
    low, high = job.number("low_freq_factor"), job.number("high_freq_factor")
    if job.take("add_rmsnorm_offset") is not None:
        job.given["layernorm_zero_centered_gamma"] = True
    if (part := job.number("partial_rotary_factor")) is not None:
        job.given["rotary_percent"] = part
    if kind is None:
        return
    factor = job.given.pop("rope_scaling_factor", None)
    if kind == "yarn":
        of_yarn: dict[str, Any] = {"rope_type": "yarn", "rotary_scaling_factor": factor} | numbers
        job.settings |= {name: value for name, value in of_yarn.items() if value is not None}
        if before is not None:
            job.settings["original_max_position_embeddings"] = int(before)
    elif kind == "llama3":
        length = before or job.number("original_max_position_embeddings")
        scaling = {"rope_low_freq_factor": low, "rope_high_freq_factor": high}
        job.settings |= {name: value for name, value in scaling.items() if value is not None}
        if length is not None:
            job.settings["rope_original_max_position_embeddings"] = int(length)
        job.given |= {"use_rope_scaling": True, "rope_scaling_factor": factor or 8.0}
    else:
        job.mistakes.add(f"rope_scaling_type = {kind}: its lists of factors are not read here")


def _read_context(job: Described) -> None:
    kind, inner = job.take("context_parallel_algo"), job.number("ulysses_degree_in_cp")
    ranks = job.degree("context")
    if kind is None or ranks == 1:
        return
    if kind not in _CONTEXT:
        job.mistakes.add(f"context_parallel_algo cannot be {kind}", works=sorted(_CONTEXT))
        return
    job.given["cp_comm_type"] = [_CONTEXT[kind]]
    if kind == "hybrid_cp_algo" and inner is not None:
        job.given["hierarchical_context_parallel_sizes"] = [int(inner), ranks // int(inner)]


def _read_layers(job: Described) -> None:
    """Which layers have experts, and which are there at all: of those that do nothing it makes
    numbers that divide."""
    every = job.given.get("num_layers")
    idle, stages = job.numbers("noop_layers"), job.numbers("num_layer_list")
    dense = int(job.number("first_k_dense_replace") or 0)
    if not isinstance(every, int):
        return
    there = [n for n in range(every) if n not in idle]
    every_which = str(job.given.get("moe_layer_freq", 1))
    if dense and job.given.get("num_experts") and every_which.removeprefix("-").isdecimal():
        each = abs(int(every_which)) or 1
        sparse = [n >= dense and n % each == 0 for n in there]
        job.given["moe_layer_freq"] = runs(sparse)
    elif every_which.startswith("-"):  # every layer's number divides by it, too
        job.given["moe_layer_freq"] = every_which[1:]
    if not idle and not stages:
        return
    ranks = job.degree("pipeline_model")
    each_stage = job.given.pop("num_layers_per_virtual_pipeline_stage", None)
    by = int(each_stage or every // ranks) or 1
    if idle:
        stages = [sum(n in there for n in range(at, at + by)) for at in range(0, every, by)]
    job.given["num_layers"] = len(there)
    if ranks > 1:
        job.cut(stages)
