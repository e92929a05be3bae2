"""Youtu-LLM and MiniCPM 3, which are dense; Mistral Small 4 and Sarvam 105B, with experts: all with
DeepSeek's latent attention."""

from dataclasses import replace
from functools import partial

from fivefold.config.huggingface.families.deepseek import LatentLike, read_latents, write_latents
from fivefold.config.huggingface.families.mistral import with_temperature
from fivefold.config.huggingface.family import EACH, TOGETHER, Family, Fields, Names, Tensors
from fivefold.config.huggingface.grouped_experts import (
    DEEPSEEK_NAMES,
    ONE_GROUP,
    GroupedExperts,
    no_predictions,
    read_of_sarvam,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import SCALINGS, Rope, read_rope, sharpened_rope
from fivefold.config.model import ModelConfig

_YOUTU = LatentLike(predicts=False, heads=16, tied=True)


def _youtu(reader: Reader) -> ModelConfig:
    """Its embeddings have initial weights of another size, by default of twice."""
    model = read_latents(reader, _YOUTU)
    usual = 2.0 / (5.0 * model.hidden_size) ** 0.5
    std = reader.number("initializer_range", usual)
    embedded = reader.number("embedding_initializer_range", 2.0 * std)
    return replace(model, init_method_std=std, embedding_init_method_std=embedded)


def _write_youtu(model: ModelConfig) -> Fields:
    embedded = model.embedding_init_method_std or model.init_method_std
    return write_latents(model, _YOUTU) | {"embedding_initializer_range": embedded}


_MINICPM3 = LatentLike(
    predicts=False, epsilon=1e-5, queries=768, heads=40, tied=True, head_dim=None
)
_UNSCALED = "scale_depth", "dim_model_base"
"""Numbers of MiniCPM 3 that may be null, where they scale nothing."""


def _minicpm3(reader: Reader) -> ModelConfig:
    """With factors of embeddings, residual branches and logits."""
    model = read_latents(reader, _MINICPM3)
    depth, width = (name in reader.fields and reader.fields[name] is None for name in _UNSCALED)
    reader.without_effect(*_UNSCALED)
    branches = 1.0 if depth else reader.number("scale_depth", 1.4) / model.num_layers**0.5
    base = model.hidden_size if width else reader.size("dim_model_base", default=256)
    return replace(
        model,
        init_method_std=reader.number("initializer_range", 0.1),
        embedding_multiplier=reader.number("scale_emb", 12.0),
        residual_multiplier=branches,
        logits_scaling=model.hidden_size / base,
    )


def _write_minicpm3(model: ModelConfig) -> Fields:
    fields = write_latents(model, _MINICPM3) | {
        "scale_emb": model.embedding_multiplier,
        "scale_depth": model.residual_multiplier * model.num_layers**0.5,
        "dim_model_base": round(model.hidden_size / model.logits_scaling),
    }
    del fields["rope_interleave"]  # whose features are always two halves
    return fields


def _mistral4_rope(reader: Reader, default: Rope) -> Rope:
    turned, others = (reader.size(f"qk_{part}_head_dim") for part in ("rope", "nope"))
    default = replace(default, share=turned / (turned + others))
    why = "transformers turns too few features by it: its table is rope_parameters"
    reader.fixed("rope_scaling", None, why=why)
    return sharpened_rope(reader, default, factor=128.0, original=8192, latents=True)


_MISTRAL4 = LatentLike(
    experts=GroupedExperts(
        scores="softmax",
        method="noaux_tc",
        normalised=True,
        scale=1.0,
        groups=1,
        chosen_groups=1,
        dense_layers=0,
        shared=1,
        experts=("n_routed_experts", "num_local_experts"),
        always=True,
        either=True,
    ),
    predicts=False,
    queries=1024,
    heads=32,
    head_dim=True,
    rope=_mistral4_rope,
)
"""Attention that gets hotter with the position, and experts by a softmax."""


def _write_mistral4(model: ModelConfig) -> Fields:
    fields = with_temperature(write_latents(model, _MISTRAL4), model)
    share = {"partial_rotary_factor": model.qk_pos_emb_head_dim / model.query_dim}
    table = share | {"rope_theta": fields.pop("rope_theta")} | fields.pop("rope_scaling", {})
    return fields | {"rope_parameters": table}


_SARVAM = LatentLike(
    experts=ONE_GROUP,
    queries=None,
    heads=None,
    predicts=False,
    head_dim=None,
    rope=partial(read_rope, latents=True, scalings=(*SCALINGS, "deepseek_yarn")),
)


def _sarvam(reader: Reader) -> ModelConfig:
    """DeepSeek-V3's layers, in files that name YaRN after it."""
    reader.also(n_shared_experts="num_shared_experts")
    model = read_latents(reader, _SARVAM)
    no_predictions(reader)
    read_of_sarvam(reader)
    reader.without_effect("q_head_dim")
    return replace(model, init_method_std=reader.number("initializer_range", 0.006))


_TOGETHER: Names = {n: t for n, t in DEEPSEEK_NAMES.items() if n not in EACH} | {**TOGETHER}
FAMILIES = (
    Family("youtu", "YoutuForCausalLM", _youtu, _write_youtu, Tensors(DEEPSEEK_NAMES, pairs=None)),
    Family("minicpm3", "MiniCPM3ForCausalLM", _minicpm3, _write_minicpm3, Tensors(DEEPSEEK_NAMES)),
    Family(
        "mistral4",
        "Mistral4ForCausalLM",
        partial(read_latents, kind=_MISTRAL4),
        _write_mistral4,
        Tensors(_TOGETHER, experts="together", pairs=None),
    ),
    Family(
        "sarvam_mla", "DeepseekV3ForCausalLM", _sarvam, None, Tensors(DEEPSEEK_NAMES, pairs=None)
    ),
)
