"""The memory techniques that the layout search tries: recomputation, offloading, a fused loss."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
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
        settings: settings that select it, by field name.
        is_full: whether it recomputes whole layers.
        base: index of the choice that equals this one without offloading, and so is no slower;
            None if there is none.
        needs_context: whether it is only for sequences that several ranks share.
    """

    settings: Mapping[str, Any]
    is_full: bool = False
    base: int | None = None
    needs_context: bool = False


def memory_choices(config: Config, given: frozenset[str]) -> list[MemoryChoice]:
    """The choices tried for every layout: recompute nothing, cheap modules, costly modules, or
    whole layers."""
    if given & set(RECOMPUTE):
        is_full = config.memory.recompute_granularity == "full"
        return _legal(config, [MemoryChoice({}, is_full)])
    whole = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": (1,),
    }
    choices = [
        MemoryChoice({"recompute_granularity": None}),
        *_module_sets(config),
        MemoryChoice(whole, is_full=True),
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
    """Further choices, tried if a fast layout does not fit with `memory_choices`.

    Each of those with activations offloaded to the host, with the loss fused with the output
    layer, and with both.
    """
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    found = []
    for number, choice in enumerate(memory_choices(config, given)):
        moved = [] if given & set(OFFLOAD) else _with_moved(config, choice)
        with_moved = [replace(each, base=number) for each in moved]
        found += with_moved
        if "cross_entropy_loss_fusion" not in given:
            found += [_beside(each, fused) for each in (choice, *with_moved)]
    return _legal(config, found)


def _with_moved(config: Config, choice: MemoryChoice) -> list[MemoryChoice]:
    """The choice with its largest remaining activations offloaded to the host."""
    if choice.is_full or config.training.cuda_graph_impl is not None:  # a graph excludes the host
        return []
    again = set(config.with_values(**choice.settings).memory.recomputed_modules)
    experts = ("expert_fc1", "moe_act") if config.model.num_experts is not None else ()
    left = () if again & {"moe", "routed_experts"} else tuple(m for m in experts if m not in again)
    modules = left or ("core_attn",)
    moved = {"fine_grained_activation_offloading": True, "offload_modules": modules}
    return [_beside(choice, moved)]


def refinements(given: frozenset[str], layers_per_stage: int) -> Iterator[dict[str, Any]]:
    """Settings for variations of a good layout: only some layers of each stage are recomputed."""
    if given & set(RECOMPUTE):
        return
    for share in (0.25, 0.5, 0.75):
        layers = round(share * layers_per_stage)
        if 0 < layers < layers_per_stage:
            yield {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": (layers,),
            }


def in_flight_limits(
    given: frozenset[str], in_flight: int, each: float, excess: float
) -> Iterator[dict[str, Any]]:
    """Settings that limit microbatches in flight, for a layout that is a little too large.

    Args:
        given: names of the settings that were given.
        in_flight: microbatches that the fullest rank holds.
        each: bytes of one of them.
        excess: bytes by which the rank is too large.
    """
    if given & {LIMIT, *RECOMPUTE} or each <= 0:
        return
    fewer = in_flight - ceil(excess / each)
    for limit in (fewer, fewer - 1):  # if another action then has the peak, one more has to go
        if limit >= 1:
            yield {LIMIT: limit}


def _module_sets(config: Config) -> list[MemoryChoice]:
    """Sets of modules to recompute, those with the least cost per byte saved first."""
    model = config.model
    norm = ("layernorm",) if model.norms_before else ()
    cheap = [norm]
    if model.multi_latent_attention and not config.reads_chosen:
        # Without a latent of their own, queries are recomputed from what the norm would discard.
        beside = () if model.q_lora_rank is None else norm
        cheap = [(*beside, "mla_up_proj"), *cheap]
    costly = ((), ("mlp",)) if model.num_experts is None else (("moe_act",), ("moe",))
    return [
        MemoryChoice(
            {"recompute_granularity": "selective", "recompute_modules": (*few, *more)},
            # Gathered latents leave no keys and values to recompute.
            needs_context=place > 0,
        )
        for more in costly
        for place, few in enumerate(cheap)
        if few or more
    ]


def _beside(choice: MemoryChoice, settings: Mapping[str, Any]) -> MemoryChoice:
    """The choice with further settings."""
    return replace(choice, settings={**choice.settings, **settings}, base=None)
