"""Checks which models with experts can start from the weights of a dense model."""

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.config.config import Config
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes
from fivefold.units import several

_NOT_FROM_DENSE: Mapping[str, str] = MappingProxyType(
    {
        "moe_shared_expert_intermediate_size": "a dense model has no weights of shared experts",
        "moe_latent_size": "a dense model has no weights of latents, which its experts read",
        "moe_apply_probs_on_input": "experts do not give a share of what their input gives",
    }
)
"""Settings of models with experts that no dense model becomes, and why."""


def check_upcycling(config: Config, mistakes: Mistakes) -> None:
    """Report why a model with experts cannot start from the weights of a dense one."""
    model, granularity = config.model, config.checkpoint.moe_upcycling_granularity
    if not config.checkpoint.moe_use_upcycling or model.num_experts is None:
        return
    off = "--no-moe-use-upcycling"
    for name, why in _NOT_FROM_DENSE.items():
        if value := getattr(model, name):
            flag = flag_of(name)
            without = f"--no-{flag.removeprefix('--')}" if value is True else f"{flag} none"
            mistakes.add(f"moe_use_upcycling and {name}: {why}", works=[without, off])
    if config.checkpoint.load_adapter is not None:
        mistakes.add(
            "moe_use_upcycling and load_adapter: an adapter of the dense model fits no expert",
            works=["--load-adapter none", off],
        )
    if model.num_experts % granularity:
        flag = "--moe-upcycling-granularity"
        works = [f"{flag} {n}" for n in (granularity - 1, 1) if n and not model.num_experts % n]
        mistakes.add(
            f"{several(model.num_experts, 'expert')} are not whole sets of "
            f"{granularity} parts of an MLP (moe_upcycling_granularity)",
            works=[*dict.fromkeys(works), f"--num-experts {granularity}"],
        )
    dense, size = model.ffn_size, granularity * model.expert_ffn_size
    if model.has_dense_layers and dense != size:
        mistakes.add(
            f"moe_use_upcycling: layers without experts have ffn_hidden_size {dense}, and the "
            f"dense model {granularity} x {model.expert_ffn_size} = {size} in all layers",
            works=[f"--ffn-hidden-size {size}"],
        )
