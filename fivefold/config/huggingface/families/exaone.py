"""EXAONE 3; EXAONE 4 and K-EXAONE, whose layers with a window alone have RoPE."""

from dataclasses import replace

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import AFTER, EACH, Family, Fields, Names, Tensors
from fivefold.config.huggingface.grouped_experts import ONE_GROUP, written_sparse
from fivefold.config.huggingface.llama_like import LlamaLike, bias_fields, both_biases
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig

_EXAONE3 = LlamaLike(
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    null_head_dim=True,
    biases=both_biases,
    code=True,
)
_EXAONE_MOE = LlamaLike(
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    heads="per_head",
    null_key_value_heads=False,
    windows=None,
)
_EXAONE4 = replace(_EXAONE_MOE, norms="after")
_EXPERTS = replace(
    ONE_GROUP, listed=True, experts=("num_experts",), always=True, shared_name="num_shared_experts"
)


def _exaone3(reader: Reader) -> ModelConfig:
    """EXAONE 3 and 3.5: Llama's layers, with GPT-2's names."""
    reader.also(
        num_hidden_layers="num_layers",
        rms_norm_eps="layer_norm_epsilon",
        hidden_act="activation_function",
    )
    model = _EXAONE3.read(reader)
    reader.fixed("embed_dropout", 0.0)
    return model


def _exaone4(reader: Reader, like: LlamaLike = _EXAONE4) -> ModelConfig:
    """EXAONE 4: norms after attention and MLP, windows in three of four layers, RoPE in these."""
    model = like.read(reader)
    window = reader.optional_size("sliding_window", default=4096, least=2)
    slides = windows.all_but_every(reader, 4, model.num_layers)
    if window is not None:
        return replace(model, **windows.with_rope(reader, window, slides, None))
    if any(slides) or reader.fields.get("layer_types") is None:
        why = "layer_types has to say that no layer has one"
        reader.unsupported("sliding_window", None, [4096], why)
    return model


def _exaone_moe(reader: Reader) -> ModelConfig:
    """K-EXAONE: EXAONE 4's windows and positions, norms before, and DeepSeek-V3's experts."""
    model = _exaone4(reader, _EXAONE_MOE)
    model = replace(model, **_EXPERTS.read(reader, model.num_layers))
    # Of files that are older than transformers' class, which has no use for these.
    sparse = [model.is_moe(layer) for layer in range(model.num_layers)]
    reader.fixed("is_moe_layer", sparse)
    reader.fixed("first_last_k_dense_replace", sparse.count(False))
    reader.without_effect("num_nextn_predict_layers")  # multi-token prediction is left out
    return model


def _write(model: ModelConfig) -> Fields:
    return _EXAONE4.write(model) | windows.fields(model)


def _write_exaone_moe(model: ModelConfig) -> Fields:
    fields = _EXAONE_MOE.write(model) | windows.fields(model) | _EXPERTS.write(model)
    return fields | {
        "num_experts": fields.pop("n_routed_experts"),
        "num_shared_experts": fields.pop("n_shared_experts"),
        "mlp_layer_types": written_sparse(model),
    }


_GPT_NAMES: Names = {
    "embed_tokens.": "wte.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    "layers.": "h.",
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
}
_GPT = Tensors(_GPT_NAMES, renamed=True, base="transformer.", last="ln_f.")
_NAMES: Names = {
    ".mlp.router.expert_bias": ".mlp.e_score_correction_bias",
    ".mlp.router.": ".mlp.gate.",
    **EACH,
}
_MOE = Tensors(_NAMES, left_out=("mtp.",))
FAMILIES = (
    Family(
        "exaone",
        "LlamaForCausalLM",
        _exaone3,
        lambda model: _EXAONE3.write(model) | bias_fields(model),
        _GPT,
    ),
    Family("exaone4", "Exaone4ForCausalLM", _exaone4, _write, Tensors(AFTER)),
    Family("exaone_moe", "ExaoneMoeForCausalLM", _exaone_moe, _write_exaone_moe, _MOE),
)
