"""Megatron-core's distributed checkpoints: where they lie, and which model their arguments tell."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fivefold.config.by_layer import OF_WINDOWS
from fivefold.config.layer_pattern import layers_of
from fivefold.config.model import ModelConfig
from fivefold.errors import CheckpointError, ConfigError, Mistake, shown
from fivefold.files import read_json, read_text

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
NEVER = "apply_residual_connection_post_layernorm", "use_mup"
"""Switches that no model here has, most of which change what the same weights compute."""
_NOT_READ = (
    *NEVER,
    *("attention_output_gate", "experimental_attention_variant", "hybrid_override_pattern"),
)
"""Those of models whose weights are not read from there."""
HYBRID_SPEC = "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"
"""The specification of models whose layers have one mixer each: its module, and its name there."""
HYBRID_EPSILON = 1e-5
"""What norms of Mamba-2's heads add to the variance there, whatever others do."""
_OURS: Mapping[str, float | str | None] = MappingProxyType(
    {
        "norm_placement": "before",
        "layernorm_bias": True,
        "norm_elementwise_affine": True,
        "embed_layernorm": False,
        "attention_out_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "clip_qkv": None,
        "position_embedding_offset": 0,
        "qk_layernorm_type": "per_head",
        "latent_norm_epsilon": None,
        "moe_router_norm_epsilon": 1e-20,
        "moe_branch_norms": False,
        "qk_layernorm_after_rope": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "rotary_base_local": None,
        **dict.fromkeys(OF_WINDOWS),
        "v_channels": None,
        "value_multiplier": 1.0,
        "v_l2_norm": False,
        "keys_as_values": False,
        "layer_scalar": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_chunk_size": None,
        "attn_temperature_tuning": False,
        "attn_temperature_rotated": False,
    }
)
"""What models there cannot have, and what they have instead."""
_OLD = "mp_rank_00*"
"""Folders of the format that Megatron-LM had before distributed checkpoints."""


def is_megatron(folder: Path) -> bool:
    """Whether Megatron-LM keeps checkpoints in a folder, or it is one of them."""
    one = (folder / METADATA).is_file() and (folder / ".metadata").is_file()
    return one or (folder / TRACKER).is_file()


def megatron_checkpoint(folder: Path, step: int | None, step_flag: str = "--ckpt-step") -> Path:
    """The folder of one distributed checkpoint.

    Args:
        folder: that folder, or the one that Megatron-LM's --save named.
        step: iteration of the checkpoint; None: the latest.
        step_flag: flag of the command with which users choose it.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    found = folder
    if (folder / METADATA).is_file():
        if step is not None and folder.name != f"iter_{step:07d}":
            what = f"{folder} is one checkpoint, and not known to be that of iteration {step}"
            raise CheckpointError(Mistake(what, works=(f"{step_flag} none",)))
    else:
        tracked = read_text(folder / TRACKER, CheckpointError) if step is None else str(step)
        told = tracked.strip()[:19]
        found = folder / (f"iter_{int(told):07d}" if told.isdecimal() else "release")
        if not found.is_dir():
            there = sorted(path.name[5:] for path in folder.glob("iter_*"))
            works = tuple(f"{step_flag} {int(step)}" for step in there if step.isdecimal())
            what = f"there is no checkpoint of iteration {told} in {folder}"
            raise CheckpointError(Mistake(what, works=works))
    if any(found.glob(_OLD)):
        what = f"{found} has the format of --ckpt-format torch, a file of each rank"
        attempt = "Megatron-LM's --ckpt-convert-format torch_dist, with --ckpt-convert-save FOLDER"
        raise CheckpointError(Mistake(what, attempt=attempt))
    kind = read_json(found / METADATA, dict[str, Any], CheckpointError).get("sharded_backend")
    if kind != "torch_dist":
        what = f"{found} is a checkpoint of format {str(kind)[:40]!r}"
        works = ("torch_dist (Megatron-LM's --ckpt-format)",)
        raise CheckpointError(Mistake(what, works=works))
    return found


def unlike(model: ModelConfig, arguments: Mapping[str, Any]) -> list[str]:
    """What differs between a model and the arguments of the run that saved a checkpoint.

    Only what is among the arguments is compared.
    """
    theirs = {"rotary_seq_len_interpolation_factor": None, **_OURS, **arguments}
    theirs |= {name: theirs[name] or False for name in _NOT_READ if name in theirs}  # None: off
    if "norm_epsilon" not in theirs and "layernorm_epsilon" in theirs:
        theirs["norm_epsilon"] = theirs["layernorm_epsilon"]
    if theirs.get("group_query_attention") is False:
        theirs["num_query_groups"] = theirs.get("num_attention_heads")
    if isinstance(theirs.get("window_size"), list | tuple):  # tokens before and behind
        theirs["window_size"] = next(iter(theirs["window_size"]), None)
    if theirs.get("add_bias_linear"):
        theirs["add_qkv_bias"] = True
    lines = [
        f"{name}: {ours}, there {shown(theirs[name])}"
        for name, ours in _told(model)
        if name in theirs and theirs[name] != ours
    ]
    if model.num_experts is not None:
        has = [model.is_moe(layer) for layer in range(model.num_layers)]
        lines += _unlike_pattern("moe_layer_freq", has, theirs)
    if model.window_size is not None:
        has = [model.window_of(layer) is not None for layer in range(model.num_layers)]
        lines += _unlike_pattern("window_attn_skip_freq", has, theirs)
    if model.activation_func in ("relu", "xielu"):
        lines.append(f"activation_func: {model.activation_func}, which no model there has")
    if model.rope_type == "proportional":
        lines.append("rope_type: proportional, there none that turns a part of whole heads")
    if model.no_rope_freq is not None:
        has = [not model.rotates(layer) for layer in range(model.num_layers)]
        lines += _unlike_pattern("no_rope_freq", has, theirs)
        if model.qk_l2_norm and theirs.get("qk_l2_norm"):
            lines.append("qk_l2_norm: of layers with RoPE, there of all (no_rope_freq)")
    return lines


def _unlike_pattern(name: str, ours: list[bool], theirs: Mapping[str, Any]) -> Iterator[str]:
    """What differs in the layers that have something."""
    if theirs.get(name) is None:
        return
    there: tuple[bool, ...] = ()
    with suppress(ConfigError):  # of another number of layers
        there = layers_of(name, _written(theirs[name]), len(ours))
    if list(there) != ours:
        yield f"{name}: another one, there {shown(theirs[name])}"


def _written(pattern: Any) -> str:
    """A pattern of layers as flags have it."""
    if isinstance(pattern, list) and all(type(entry) is int for entry in pattern):
        return str(pattern)
    return str(pattern) if isinstance(pattern, str | int) else ""


def _told(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Megatron-LM's arguments of a model, as far as weights or what they compute depend on them."""
    yield from (
        (name, getattr(model, name))
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "position_embedding_type"),
            *("normalization", "norm_epsilon", "add_bias_linear", "qk_layernorm", "num_experts"),
            *("untie_embeddings_and_output_weights", "multi_latent_attention", "softmax_type"),
            *("window_size", "apply_layernorm_1p", "qk_l2_norm"),
        )
    )
    yield "num_query_groups", model.num_kv_heads
    yield "kv_channels", model.head_dim
    yield "add_qkv_bias", model.qkv_bias
    yield "swiglu", model.gated_linear_unit and model.activation_func == "silu"
    if model.has_dense_layers:
        yield "ffn_hidden_size", model.ffn_size
    yield "quick_geglu", model.gated_linear_unit and model.activation_func == "quick_gelu"
    yield "squared_relu", model.activation_func == "squared_relu"
    for name in ("glu_linear_offset", "activation_func_clamp_value"):
        yield name, getattr(model, name)
    gelu = model.activation_func != "squared_relu" and not model.gated_linear_unit
    if model.num_experts is None and model.add_bias_linear and gelu:
        # Fused with the bias its GELU is by tanh, else by erf.
        yield "bias_gelu_fusion", model.activation_func == "gelu_tanh"
    for switch in _NOT_READ:
        yield switch, False
    yield "softmax_scale", model.softmax_scale
    for name in _OURS:
        yield name, getattr(model, name)
    if model.position_embedding_type == "rope":
        if model.no_rope_freq is None:
            yield "no_rope_freq", None
        stretches = "rotary_seq_len_interpolation_factor", "use_rope_scaling"
        for name in ("rotary_base", "rotary_percent", "rotary_interleaved", *stretches):
            yield name, getattr(model, name)
        if model.use_rope_scaling:
            yield "rope_scaling_factor", model.rope_scaling_factor
    if model.num_experts is None:
        return
    yield "moe_ffn_hidden_size", model.expert_ffn_size
    yield "moe_shared_expert_intermediate_size", model.shared_ffn_size or None
    for name in ("topk", "score_function", "pre_softmax", "topk_scaling_factor", "num_groups"):
        yield f"moe_router_{name}", getattr(model, f"moe_router_{name}")
    yield "moe_apply_probs_on_input", model.moe_apply_probs_on_input
    yield "moe_latent_size", model.moe_latent_size
    yield "moe_router_enable_expert_bias", model.moe_router_enable_expert_bias
    if model.moe_router_num_groups is not None:
        yield "moe_router_group_topk", model.moe_router_group_topk
