"""Makes one device compute like several ranks where results depend on the layout.

Two rules of experts depend on it: the capacity of an expert, or of a rank that holds experts, is
counted per sending rank; and global_aux_loss counts the microbatches that all ranks have run so
far. The scales of 8-bit operands depend on what a rank multiplies, and the blocks of ZeRO++'s
messages on what a rank holds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.config.config import Config
from fivefold.config.training import TrainingConfig
from fivefold.context.install import shards_of
from fivefold.data_parallel.blocks import WEIGHT_BITS, in_few_bits
from fivefold.data_parallel.communication import HierarchicalReduceScatter, NodeGather
from fivefold.data_parallel.quantised import Blocks, Whole
from fivefold.mesh.degrees import grid_of
from fivefold.model.batch import Batch, taken
from fivefold.model.eight_bit.fp8 import EACH_ELEMENT
from fivefold.model.eight_bit.layers import change_products, eight_bit_layers
from fivefold.model.moe.routing import Router
from fivefold.model.shards import MicrobatchShare
from fivefold.model.transformer import Stage


def experts_depend(config: Config) -> bool:
    """Whether experts of the plain model must know degrees of parallelism."""
    experts = config.experts
    return experts.limits_rows or "global_aux_loss" in experts.moe_router_load_balancing_type


def stand_in(model: Stage, config: Config) -> None:
    """Make a plain model with experts decide as the ranks of a layout do."""
    if model.model.num_experts is None or not experts_depend(config):
        return
    limit, dp = _LimitByRank(config), config.parallel.data_parallel_size
    ep = config.parallel.expert_model_parallel_size
    for mixture in model.mixtures:
        mixture.router.limit = limit
        around = replace(mixture.router.surroundings, all_ranks=dp, expert_ranks=ep)
        mixture.router.surroundings = around
    model.register_forward_pre_hook(lambda _, arguments: limit.see(arguments[1]))


def scale_each_element(stage: Stage, training: TrainingConfig) -> None:
    """Give each element of an 8-bit operand its own scale, in layers with such operands.

    Elements that share a scale are multiplied on the same rank, so scales depend on how a layout
    cuts a tensor. A block of one element cannot be cut: everything else then is as in training, and
    all layouts round alike. Delayed scales are the same in every layout, and stay as they are.
    """
    if training.delays_scales:
        return
    for module, _ in eight_bit_layers(stage).values():
        change_products(module, recipe=EACH_ELEMENT)


EACH_WEIGHT = Blocks(WEIGHT_BITS, size=1, powers_of_two=True)


def send_each_element(exchanges: Iterable[NodeGather | HierarchicalReduceScatter]) -> None:
    """Give each weight that ZeRO++ gathers its own scale, and send gradients unrounded.

    The first makes rounding independent of shards. The second cannot be: sums of rounded gradients
    depend on who rounds what. What is sent where, and who adds what up, is as in training.
    """
    for exchange in exchanges:
        if exchange.format is not None:
            gathers = isinstance(exchange, NodeGather)
            blocks = EACH_WEIGHT if gathers else Whole(exchange.format.dtype)
            exchange.format = exchange.format.sending(blocks)


def round_gathered(model: Stage, config: Config) -> None:
    """Give a plain model the rounded weights with which ranks compute if ZeRO++ gathers them
    (qwZ)."""
    if not config.parallel.zero_quantized_weights:
        return
    whole = grid_of(config.parallel).expert_shards == 1  # experts that are not gathered
    kept = {p for m in model.mixtures for p in m.experts.parameters() if whole}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter not in kept and in_few_bits(tuple(parameter.shape)):
                parameter.copy_(EACH_WEIGHT.rounded(parameter))


class _LimitByRank:
    """The `limit` seam: capacity is counted separately for each rank's tokens."""

    def __init__(self, config: Config) -> None:
        self._window = config.model.widest_window
        self._cp = config.parallel.context_parallel_size
        self._tp = config.parallel.tensor_model_parallel_size
        self._parts: list[Tensor] = []

    def see(self, batch: Batch) -> None:
        """Set which tokens of the next microbatch each rank holds."""
        places = torch.arange(batch.tokens.numel()).view(batch.tokens.shape)
        parts = [places]
        if self._cp > 1:
            shards = shards_of(batch, self._window, self._cp)
            parts = [taken(places, MicrobatchShare(shards, rank)) for rank in range(self._cp)]
        self._parts = [chunk for part in parts for chunk in part.flatten().chunk(self._tp)]

    def __call__(self, router: Router, experts_TK: Tensor, logits_TE: Tensor) -> Tensor | None:
        """[T, K] whether each expert has capacity for the token."""
        kept_TK = torch.ones_like(experts_TK, dtype=torch.bool)
        for part in self._parts:
            kept = router.within_capacity(experts_TK[part], logits_TE[part])
            if kept is None:
                return None
            kept_TK[part] = kept
        return kept_TK


def in_order(model: Stage, batches: Sequence[Batch]) -> Iterator[tuple[int, Batch]]:
    """(number, microbatch) of a step, in the order in which data-parallel ranks run them.

    Before each round of simultaneous microbatches, every router is given the load of all of them,
    as it would learn from the other ranks.
    """
    routers = [mixture.router for mixture in model.mixtures]
    dp = routers[0].surroundings.all_ranks if routers else 1
    if dp == 1:
        yield from enumerate(batches)
        return
    each = len(batches) // dp
    for place in range(each):
        numbers = range(place, len(batches), each)
        together = [batches[number] for number in numbers]
        before = [router.batch_counts for router in routers]
        loads = _loads(model, routers, together)
        for number, batch in zip(numbers, together, strict=True):
            for router, state, load in zip(routers, before, loads, strict=True):
                router.batch_counts = state
                router.surroundings = replace(router.surroundings, batch=partial(_known, load))
            yield number, batch


def _known(load_E: Tensor, _: Tensor) -> Tensor:
    return load_E


def _loads(model: Stage, routers: Sequence[Router], together: Sequence[Batch]) -> list[Tensor]:
    """For each router, [E] choices of the tokens of several microbatches."""
    totals: list[Any] = [0] * len(routers)
    for index, router in enumerate(routers):

        def add(counts_E: Tensor, index: int = index) -> Tensor:
            totals[index] = totals[index] + counts_E
            return counts_E

        router.surroundings = replace(router.surroundings, batch=add)
    with torch.no_grad():
        for batch in together:
            model(None, batch)
    return totals
