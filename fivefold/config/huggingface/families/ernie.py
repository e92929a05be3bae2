"""ERNIE 4.5: Llama's layers with RoPE in pairs of neighbours, and its mixtures of experts."""

from dataclasses import replace

from fivefold.config.huggingface.family import EACH, Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import layer_frequency
from fivefold.config.model import ModelConfig

_DENSE = LlamaLike(
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tied=True,
    null_head_dim=True,
    code=True,
    padded=True,
)
_MIXTURE = LlamaLike(
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tied=True,
    null_key_value_heads=False,
    code=True,
    padded=True,
)


def _dense(reader: Reader) -> ModelConfig:
    """The dense model, whose linear layers all have biases, or none."""
    model = _DENSE.read(reader)
    reader.fixed("attention_dropout", 0.0, why="transformers has none in this family")
    return replace(model, add_bias_linear=reader.flag("use_bias", False))


def _mixture(reader: Reader) -> ModelConfig:
    """Experts after dense layers, chosen by a softmax with a bias, and some of all tokens."""
    model = _MIXTURE.read(reader)
    layers = model.num_layers
    read_balancing(reader)
    reader.fixed("attention_dropout", 0.0, why="transformers has none in this family")
    reader.fixed("use_bias", False, why="it would give the output layer one, too")
    # Of the published files, which transformers has no use for; multi-token prediction is left out.
    reader.fixed("use_rmsnorm", True)
    reader.fixed("moe_use_aux_free", True)
    reader.fixed("moe_gate", "topk")
    reader.without_effect("moe_capacity", "num_nextn_predict_layers")
    reader.fixed("moe_norm_min", 1e-12)
    first = reader.size("moe_layer_start_index", default=1, least=0)
    last = reader.size("moe_layer_end_index", default=-1, least=-1)
    last = layers - 1 if last == -1 else last
    step = reader.size("moe_layer_interval", default=1)
    inner = reader.size("moe_intermediate_size")
    shared = reader.size("moe_num_shared_experts", default=2, least=0)
    experts = reader.size("moe_num_experts", "num_experts", default=64)
    topk = reader.size("moe_k", "num_experts_per_tok", default=6)
    sparse = [first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(sparse):
        return model
    return replace(
        model,
        num_experts=experts,
        moe_router_topk=topk,
        moe_router_enable_expert_bias=True,
        moe_ffn_hidden_size=inner,
        moe_shared_expert_intermediate_size=shared * inner or None,
        moe_layer_freq=layer_frequency(sparse),
    )


def _write(model: ModelConfig) -> Fields:
    fields = _DENSE.write(model) | {"use_bias": model.add_bias_linear}
    del fields["attention_dropout"]  # there is none in this family
    return fields


def _write_mixture(model: ModelConfig) -> Fields:
    sparse = [layer for layer in range(model.num_layers) if model.is_moe(layer)]
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return _write(model) | {
        "moe_num_experts": model.num_experts,
        "moe_k": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "moe_num_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "moe_layer_start_index": sparse[0] if sparse else model.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else -1,
        "moe_layer_interval": interval,
    }


_NAMES = {
    ".mlp.router.expert_bias": ".mlp.moe_statics.e_score_correction_bias",
    ".mlp.router.": ".mlp.gate.",
    **EACH,
}
_MOE = Tensors(_NAMES, pairs=True, bias_in_row=True, left_out=("mtp_",))
FAMILIES = (
    Family("ernie4_5", "Ernie4_5ForCausalLM", _dense, _write, Tensors(pairs=True)),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _mixture, _write_mixture, _MOE),
)
