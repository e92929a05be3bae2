"""Checks what Muon cannot be combined with, and where attention logits cannot be measured or
clipped."""

from collections.abc import Iterator

from fivefold.config.config import SETTINGS, Config
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes

_OTHERWISE = "--optimizer adam"
_NORMS = ("qk_layernorm", "qk_l2_norm")


def check_optimizer(config: Config, mistakes: Mistakes) -> None:
    """Report AdamW settings that Muon lacks, and logits that cannot be measured or clipped."""
    if config.optimizer.optimizer == "muon":
        _check_muon(config, mistakes)
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config.optimizer, name):
            off = flag_of(f"no_{name}")
            for what, works in (
                *_unknown(config),
                *(_unclipped(config) if name == "qk_clip" else ()),
            ):
                mistakes.add(f"{name}: {what}", works=(*works, off))


def _check_muon(config: Config, mistakes: Mistakes) -> None:
    if config.optimizer.use_precision_aware_optimizer:
        mistakes.add(
            "use_precision_aware_optimizer chooses types of AdamW's state; Muon keeps the mean of "
            "gradients and the weights that it updates in fp32",
            works=("--no-use-precision-aware-optimizer", _OTHERWISE),
        )
    for name in ("optimizer_cpu_offload", "offload_optimizer_states"):
        if getattr(config.memory, name):
            mistakes.add(
                f"{name} moves the state of AdamW, which is updated part by part; Muon needs whole "
                "matrices, and keeps half as much",
                works=(flag_of(f"no_{name}"), _OTHERWISE),
            )


def _unknown(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Why the attention logits of the model cannot be measured, and what helps."""
    model = config.model
    if not any(map(model.is_softmax, range(model.num_layers))):
        yield "no layer has attention with a softmax, whose logits it is of", ()
    if model.is_sparse:
        what = (
            "experimental_attention_variant dsa does not report the logits of the tokens it chooses"
        )
        yield what, ()
    if model.attn_logit_softcapping is not None:
        cap = f"attn_logit_softcapping {model.attn_logit_softcapping:g}"
        yield f"no logit grows above {cap}", ("--attn-logit-softcapping none",)


def _unclipped(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Why scaling the weights of queries and keys would have no effect, and what helps."""
    model = config.model
    for name in _NORMS:
        if getattr(model, name) and not model.multi_latent_attention:
            what = f"{name} undoes what scaling the weights of queries and keys would do"
            yield what, (SETTINGS[name].typed(False),)
    if model.clip_qkv is not None:
        yield "clip_qkv bounds what scaled weights make, by itself", ("--clip-qkv none",)
    if model.keys_as_values:
        yield "keys_as_values scales values with keys", ("--no-keys-as-values",)
    if model.lora_rank is not None:
        yield "lora_rank leaves the weights that it scales as they are", ("--lora-rank none",)
