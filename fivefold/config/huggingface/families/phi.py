"""Phi-3, Phi-3.5 and Phi-4: joint projections, LongRoPE, windows."""

from dataclasses import replace

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import GATE_UP, Family, Fields, Tensors
from fivefold.config.huggingface.llama_like import LlamaLike, equal_dropouts
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
    dropout = equal_dropouts(reader, ("resid_pdrop", "embd_pdrop"), 0.0)
    return replace(model, hidden_dropout=dropout)


def _write(model: ModelConfig) -> Fields:
    fields = _PHI3.write(model)
    fields |= dict.fromkeys(("resid_pdrop", "embd_pdrop"), model.hidden_dropout)
    if model.rope_type == "longrope":  # under the names of the published files
        rope = fields["rope_scaling"]
        original = rope.pop("original_max_position_embeddings")
        fields["original_max_position_embeddings"] = original
        rope["type"] = rope.pop("rope_type")
    fields["partial_rotary_factor"] = model.rotary_percent
    return fields | {"sliding_window": windows.written_width(model.widest_window)}


_JOINT = {f".self_attn.{part}_proj.": ".self_attn.qkv_proj." for part in "qkv"}
_TENSORS = Tensors({**_JOINT, **GATE_UP}, joint_qkv="in_turn", joint_mlp=True)
FAMILIES = (Family("phi3", "Phi3ForCausalLM", _read, _write, _TENSORS),)
