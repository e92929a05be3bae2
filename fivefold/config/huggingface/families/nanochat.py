"""nanochat: norms without weights, of embeddings and heads, too; RoPE that turns the other way."""

from dataclasses import replace

from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.fields import activation_name
from fivefold.config.huggingface.llama_like import LlamaLike, attention_biases
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig

_NANOCHAT = LlamaLike(activation="relu2", biases=attention_biases, padded=True)


def _read(reader: Reader) -> ModelConfig:
    model = _NANOCHAT.read(reader)
    return replace(
        model,
        gated_linear_unit=False,
        norm_elementwise_affine=False,
        embed_layernorm=True,
        qk_l2_norm=True,
        final_logit_softcapping=reader.number_or_null("final_logit_softcapping", 15.0),
    )


def _write(model: ModelConfig) -> Fields:
    return _NANOCHAT.write(model) | {
        "hidden_act": activation_name(model),
        "attention_bias": model.output_bias,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


_TENSORS = Tensors(
    {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."},
    turns_back=True,
)
FAMILIES = (Family("nanochat", "NanoChatForCausalLM", _read, _write, _TENSORS),)
