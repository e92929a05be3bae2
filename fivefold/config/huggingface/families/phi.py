"""Phi-1, 1.5 and 2: attention and MLP side by side after one LayerNorm, biases everywhere; Phi-3,
Phi-3.5 and Phi-4: joint projections, LongRoPE, windows."""

from dataclasses import replace

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import GATE_UP, Family, Fields, Tensors
from fivefold.config.huggingface.fields import gpt_activation_name
from fivefold.config.huggingface.llama_like import LlamaLike, dropouts, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import PHI3, Rope, read_rope
from fivefold.config.model import ModelConfig


def _rope(reader: Reader, default: Rope) -> Rope:
    original = reader.size("original_max_position_embeddings", default=4096)
    return read_rope(reader, default, scalings=PHI3, original=original)


_PHI3 = LlamaLike(rms_norm_eps=1e-5, windows=windows.everywhere, rope=_rope, code=True, padded=True)


def _read(reader: Reader) -> ModelConfig:
    model = _PHI3.read(reader)
    # Of Phi-4-mini's file, and transformers has no use for them.
    reader.fixed("lm_head_bias", False)
    reader.fixed("full_attn_mod", 1)
    reader.fixed("interpolate_factor", 1)
    return replace(model, **dropouts(reader, "resid_pdrop", "embd_pdrop", 0.0))


def _write(model: ModelConfig) -> Fields:
    fields = _PHI3.write(model)
    fields |= {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.embedded_dropout}
    if model.rope_type == "longrope":  # under the names of the published files
        rope = fields["rope_scaling"]
        original = rope.pop("original_max_position_embeddings")
        fields["original_max_position_embeddings"] = original
        rope["type"] = rope.pop("rope_type")
    fields["partial_rotary_factor"] = model.rotary_percent
    return fields | {"sliding_window": windows.written_width(model.widest_window)}


_PHI = LlamaLike(
    rms_norm_eps=1e-5,
    rotary_share=0.5,
    activation="gelu_new",
    epsilon="layer_norm_eps",
    biases=lambda _: {"add_bias_linear": True},
    rope=read_rope,
)


def _phi(reader: Reader) -> ModelConfig:
    """Phi-1, 1.5 and 2, whose output layer has a bias, too."""
    model = _PHI.read(reader)
    refuse_head_dim(reader, model)
    reader.fixed("qk_layernorm", False, why="each head would have a LayerNorm")
    return replace(
        model,
        normalization="LayerNorm",
        gated_linear_unit=False,
        parallel_residual=True,
        parallel_residual_one_norm=True,
        lm_head_bias=True,
        **dropouts(reader, "resid_pdrop", "embd_pdrop", 0.0),
    )


def _write_phi(model: ModelConfig) -> Fields:
    fields = _PHI.write(model)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    del fields["head_dim"]  # hidden_size / num_attention_heads
    return fields | {
        "hidden_act": gpt_activation_name(model),
        "partial_rotary_factor": model.rotary_percent,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.embedded_dropout,
    }


_JOINT = {f".self_attn.{part}_proj.": ".self_attn.qkv_proj." for part in "qkv"}
_TENSORS = Tensors({**_JOINT, **GATE_UP}, joint_qkv="in_turn", joint_mlp=True)
_PHI_TENSORS = Tensors(
    {
        ".self_attn.o_proj.": ".self_attn.dense.",
        ".mlp.up_proj.": ".mlp.fc1.",
        ".mlp.down_proj.": ".mlp.fc2.",
    },
    last="final_layernorm.",
)
FAMILIES = (
    Family("phi3", "Phi3ForCausalLM", _read, _write, _TENSORS),
    Family("phi", "PhiForCausalLM", _phi, _write_phi, _PHI_TENSORS),
)
