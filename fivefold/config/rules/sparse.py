"""Checks attention to the tokens that an indexer chooses (dsa)."""

from fivefold.config.by_layer import OF_INDEXER, OF_ITS_LOSS
from fivefold.config.config import SETTINGS
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes

_VARIANT = "experimental_attention_variant"
_DSA = f"{_VARIANT} dsa"
V32_SIZES = {
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
}
"""Sizes of DeepSeek-V3.2's indexer, which the advice names."""
TO_HAVE_IT = " ".join(
    (
        f"--multi-latent-attention {flag_of(_VARIANT)} dsa",
        *(f"{flag_of(name)} {size}" for name, size in V32_SIZES.items()),
    )
)
"""Flags that give a model an indexer."""
_LACKING = (
    ("window_size", "a window"),
    ("attention_chunk_size", "chunks"),
    ("attn_logit_softcapping", "a cap of its scores"),
    ("softmax_type", "learned sinks"),
    ("attention_dropout", "dropout of probabilities"),
    ("position_embedding_type", "other positions than those of RoPE"),
)


def check_sparse(model: ModelConfig, mistakes: Mistakes) -> None:
    """Report what is wrong with an indexer, and what attention to chosen tokens cannot do."""
    if not model.is_sparse:
        return
    off = without_it(model)
    if not model.multi_latent_attention:
        what = f"{_DSA} needs multi_latent_attention: its indexer makes queries from the latents"
        hybrid = model.hybrid_override_pattern is not None
        mistakes.add(what, works=(off,) if hybrid else ("--multi-latent-attention", off))
    missing = [name for name in OF_INDEXER if getattr(model, name) is None]
    if missing:
        sizes = " ".join(f"{flag_of(name)} {V32_SIZES[name]}" for name in missing)
        mistakes.add(f"{_DSA} needs {', '.join(missing)}", works=(sizes, off))
    dim, rotary = model.dsa_indexer_head_dim, model.qk_pos_emb_head_dim
    if dim is not None and dim < rotary and model.multi_latent_attention:
        mistakes.add(
            f"dsa_indexer_head_dim {dim} is less than qk_pos_emb_head_dim {rotary}, the number of "
            "rotary features in each of the indexer's heads",
            works=(f"--dsa-indexer-head-dim {rotary}", f"--qk-pos-emb-head-dim {dim - dim % 2}")[
                : 1 + (dim > 1)
            ],
        )
    if model.dsa_indexer_loss_coeff and not model.trains_all:
        mistakes.add(
            f"dsa_indexer_loss_coeff = {model.dsa_indexer_loss_coeff:g} trains the indexer, which "
            "stays as it is beside adapters (lora_rank), like all that has none",
            works=("--dsa-indexer-loss-coeff none", "--lora-rank none"),
        )
    for name, what in _LACKING:
        default = SETTINGS[name].default
        if getattr(model, name) != default:
            mistakes.add(
                f"{name} = {SETTINGS[name].words(getattr(model, name))}: {_DSA} has no {what}",
                works=(SETTINGS[name].typed(default), off),
            )


def check_sparse_ranks(model: ModelConfig, parallel: ParallelConfig, mistakes: Mistakes) -> None:
    """Report kinds of context parallelism that dsa cannot be combined with."""
    cp, kinds = parallel.context_parallel_size, dict.fromkeys(parallel.cp_comm_type)
    others = [kind for kind in kinds if kind != "all_gather"]
    if model.is_sparse and cp > 1 and others:
        mistakes.add(
            f"{_DSA} does not go with cp_comm_type {' '.join(others)}: the best tokens of a query "
            "are chosen among all before it, whose latents and indexer's keys, which are small, "
            "each rank has to gather first",
            works=("--cp-comm-type all_gather", "--context-parallel-size 1", without_it(model)),
        )


def without_it(model: ModelConfig) -> str:
    """Flags that make a model attend to all tokens."""
    changed = (n for n in (*OF_INDEXER, *OF_ITS_LOSS) if getattr(model, n) != SETTINGS[n].default)
    settings = [SETTINGS[name] for name in (_VARIANT, *changed)]
    return " ".join(setting.typed(setting.default) for setting in settings)
