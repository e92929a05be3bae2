"""What a plan may recompute, offload or fuse to save memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig

RECOMPUTE = tuple(f.name for f in fields(MemoryConfig) if f.name.startswith("recompute_"))
OFFLOAD = ("fine_grained_activation_offloading", "offload_modules")


@dataclass(frozen=True)
class MemoryChoice:
    """One set of memory techniques.

    Attributes:
        name: for people.
        settings: that ask for it.
        is_full: whether it repeats whole layers.
    """

    name: str
    settings: Mapping[str, Any] = field(compare=False)
    is_full: bool = False


def memory_choices(config: Config, given: frozenset[str]) -> list[MemoryChoice]:
    """What the search tries everywhere: nothing, cheap modules, costly modules, whole layers."""
    if given & set(RECOMPUTE):
        is_full = config.memory.recompute_granularity == "full"
        return [MemoryChoice(describe(config.memory), {}, is_full)]
    return [
        MemoryChoice("no recompute", _settings(recompute_granularity=None)),
        *(_selective(modules) for modules in _module_sets(config.model)),
        MemoryChoice(
            "full recompute",
            _settings(
                recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
            ),
            is_full=True,
        ),
    ]


def refinements(
    config: Config, given: frozenset[str], layers_per_stage: int
) -> Iterator[MemoryChoice]:
    """What is worth a try around a good layout: parts of layers, offloading, a fused loss."""
    if not given & set(RECOMPUTE):
        for share in (0.25, 0.5, 0.75):
            layers = round(share * layers_per_stage)
            if 0 < layers < layers_per_stage:
                yield MemoryChoice(
                    f"full recompute of {layers} layers a stage",
                    _settings(
                        recompute_granularity="full",
                        recompute_method="block",
                        recompute_num_layers=layers,
                    ),
                )
    if not given & set(OFFLOAD):
        experts = config.model.num_experts is not None
        modules: tuple[str, ...] = ("expert_fc1", "moe_act") if experts else ("core_attn",)
        yield MemoryChoice(
            f"offload {' '.join(modules)}",
            _settings(fine_grained_activation_offloading=True, offload_modules=modules),
        )
    if "cross_entropy_loss_fusion" not in given:
        yield MemoryChoice(
            "loss fused with the output layer",
            _settings(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"),
        )


def describe(memory: MemoryConfig) -> str:
    """Recompute settings in a few words."""
    if memory.recompute_granularity is None:
        return "no recompute"
    if memory.recompute_granularity == "selective":
        return f"recompute {' '.join(memory.recompute_modules)}"
    if memory.recompute_method == "block":
        return f"full recompute of {memory.recompute_num_layers} layers a stage"
    return "full recompute"


def _selective(modules: tuple[str, ...]) -> MemoryChoice:
    return MemoryChoice(
        f"recompute {' '.join(modules)}",
        _settings(recompute_granularity="selective", recompute_modules=modules),
    )


def _module_sets(model: ModelConfig) -> list[tuple[str, ...]]:
    """Modules by what their recomputation costs for the bytes that it saves."""
    cheap: tuple[str, ...] = ("layernorm",)
    if model.multi_latent_attention:
        cheap += ("mla_up_proj",)
    if model.num_experts is None:
        return [cheap, (*cheap, "mlp")]
    return [(*cheap, "moe_act"), (*cheap, "moe")]


def _settings(**settings: Any) -> Mapping[str, Any]:
    return MappingProxyType(settings)
