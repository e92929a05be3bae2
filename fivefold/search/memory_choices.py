"""The memory techniques that the layout search tries: recomputation, offloading, a fused loss."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil
from types import MappingProxyType
from typing import Any

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.rules.memory import check_memory
from fivefold.errors import Mistakes

LIMIT = "recompute_in_flight_limit"
RECOMPUTE = tuple(
    f.name for f in fields(MemoryConfig) if f.name.startswith("recompute_") and f.name != LIMIT
)
OFFLOAD = ("fine_grained_activation_offloading", "offload_modules")


@dataclass(frozen=True)
class MemoryChoice:
    """One combination of memory techniques.

    Attributes:
        name: description for people.
        settings: settings that select it, by field name.
        is_full: whether it recomputes whole layers.
        base: index of the choice that equals this one without offloading, and so is no slower;
            None if there is none.
        needs_context: whether it is only for sequences that several ranks share.
    """

    name: str
    settings: Mapping[str, Any] = field(compare=False)
    is_full: bool = False
    base: int | None = None
    needs_context: bool = False


def memory_choices(config: Config, given: frozenset[str]) -> list[MemoryChoice]:
    """The choices tried for every layout: recompute nothing, cheap, costly modules, or all."""
    if given & set(RECOMPUTE):
        is_full = config.memory.recompute_granularity == "full"
        return _legal(config, [MemoryChoice(describe(config.memory), {}, is_full)])
    choices = [
        MemoryChoice("no recompute", _settings(recompute_granularity=None)),
        *_module_sets(config.model),
        MemoryChoice(
            "full recompute",
            _settings(
                recompute_granularity="full", recompute_method="uniform", recompute_num_layers=(1,)
            ),
            is_full=True,
        ),
    ]
    return _legal(config, choices)


def _legal(config: Config, choices: Iterable[MemoryChoice]) -> list[MemoryChoice]:
    """The choices that are legal for the model, its sequence slices and the given settings."""
    sliced, found = config.parallel.num_sequence_slices > 1, []
    for choice in choices:
        mistakes = Mistakes()
        check_memory(config.with_values(**choice.settings).memory, config.model, mistakes)
        # A whole layer of one slice cannot run again: its keys and values serve later slices.
        if not mistakes.found and not (sliced and choice.is_full):
            found.append(choice)
    return found


def further_choices(config: Config, given: frozenset[str]) -> list[MemoryChoice]:
    """Further choices, tried where a fast layout does not fit with `memory_choices`.

    Each of those with activations offloaded to the host, with the loss fused with the output
    layer, and with both.
    """
    fused = MemoryChoice(
        "loss fused with the output layer",
        _settings(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"),
    )
    found = []
    for number, choice in enumerate(memory_choices(config, given)):
        moved = [] if given & set(OFFLOAD) else _with_moved(config, choice)
        with_moved = [replace(each, base=number) for each in moved]
        found += with_moved
        if "cross_entropy_loss_fusion" not in given:
            found += [_together(each, fused) for each in (choice, *with_moved)]
    return _legal(config, found)


def _with_moved(config: Config, choice: MemoryChoice) -> list[MemoryChoice]:
    """The choice with its largest remaining activations offloaded to the host."""
    if choice.is_full or config.training.cuda_graph_impl is not None:  # which needs no host
        return []
    again = set(config.with_values(**choice.settings).memory.remade_modules)
    experts = ("expert_fc1", "moe_act") if config.model.num_experts is not None else ()
    left = () if again & {"moe", "routed_experts"} else tuple(m for m in experts if m not in again)
    modules = left or ("core_attn",)
    moved = MemoryChoice(
        f"offload {' '.join(modules)}",
        _settings(fine_grained_activation_offloading=True, offload_modules=modules),
    )
    return [_together(choice, moved)]


def refinements(given: frozenset[str], layers_per_stage: int) -> Iterator[MemoryChoice]:
    """Variations of a good layout: full recomputation of only some layers of each stage."""
    if given & set(RECOMPUTE):
        return
    for share in (0.25, 0.5, 0.75):
        layers = round(share * layers_per_stage)
        if 0 < layers < layers_per_stage:
            yield MemoryChoice(
                f"full recompute of {layers} layers a stage",
                _settings(
                    recompute_granularity="full",
                    recompute_method="block",
                    recompute_num_layers=(layers,),
                ),
            )


def in_flight_limits(
    given: frozenset[str], in_flight: int, each: float, excess: float
) -> Iterator[MemoryChoice]:
    """What makes a layout fit that is a little too large: fewer microbatches are held.

    Args:
        given: names of the settings that were given.
        in_flight: microbatches that the fullest rank holds.
        each: bytes of one of them.
        excess: bytes by which the rank is too large.
    """
    if given & {LIMIT, *RECOMPUTE} or each <= 0:
        return
    fewer = in_flight - ceil(excess / each)
    for limit in (fewer, fewer - 1):  # where the peak comes with another act, one more has to go
        if limit >= 1:
            settings = _settings(recompute_in_flight_limit=limit)
            yield MemoryChoice(f"recompute beyond {limit} in flight", settings)


def describe(memory: MemoryConfig) -> str:
    """A short description of the recompute settings."""
    if memory.recompute_granularity is None:
        return "no recompute"
    what = "full recompute"
    if memory.recompute_granularity == "selective":
        what = f"recompute {' '.join(memory.recompute_modules)}"
    if memory.recompute_method == "block":
        numbers = " ".join(map(str, memory.recompute_num_layers))
        by_stage = "by stage" if " " in numbers else "a stage"
        return f"{what} of {numbers} layers {by_stage}"
    return what


def _module_sets(model: ModelConfig) -> list[MemoryChoice]:
    """Sets of modules to recompute, those with the least cost per byte saved first."""
    norm = ("layernorm",) if model.norms_before else ()
    cheap = [norm]
    if model.multi_latent_attention:
        # Without a latent of their own, queries are made again of what the norm would discard.
        beside = () if model.q_lora_rank is None else norm
        cheap = [(*beside, "mla_up_proj"), *cheap]
    costly = ((), ("mlp",)) if model.num_experts is None else (("moe_act",), ("moe",))
    return [
        MemoryChoice(
            f"recompute {' '.join((*few, *more))}",
            _settings(recompute_granularity="selective", recompute_modules=(*few, *more)),
            # Gathered latents leave no keys and values to make again.
            needs_context=place > 0,
        )
        for more in costly
        for place, few in enumerate(cheap)
        if few or more
    ]


def _together(*choices: MemoryChoice) -> MemoryChoice:
    return MemoryChoice(
        ", ".join(choice.name for choice in choices),
        _settings(**{name: value for choice in choices for name, value in choice.settings.items()}),
        any(choice.is_full for choice in choices),
        needs_context=any(choice.needs_context for choice in choices),
    )


def _settings(**settings: Any) -> Mapping[str, Any]:
    return MappingProxyType(settings)
