"""Finds errors that no device reports, by comparing what must be the same to the last bit.

Replicas hold the same weights, and compute the same loss from the same microbatches. A device or a
memory that computes or keeps something else shows nowhere but there.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.counts.parameters import ParameterRecord
from fivefold.data.loader import Loader
from fivefold.mesh.collectives import all_gather, all_reduce
from fivefold.mesh.slices import local_slices, local_tensor
from fivefold.train.engine import Engine

SHOWN = 8  # ranks
_PIECE = 1 << 20  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_FACTOR = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX generator


class SilentErrors:
    """Compares replicas at the intervals of the settings; 0: never.

    Args:
        engine: engine of this rank.
        loader: training batches of this data-parallel rank.
    """

    def __init__(self, engine: Engine, loader: Loader) -> None:
        self._engine, self._loader = engine, loader
        self._grid, self._groups = engine.layout.grid, engine.groups
        training = engine.layout.config.training
        self._weights_every = training.check_weight_hash_across_dp_replicas_interval
        self._loss_every = training.check_loss_across_dp_replicas_interval
        self._seed, self._compared = training.seed, 0

    def look(self, step: int, *, saving: bool) -> list[str]:
        """Lines that name ranks which differ from their replicas, the same on every rank; none if
        all is well or nothing is due; collective.

        Args:
            step: number of steps done.
            saving: whether a checkpoint is about to be written, which must not keep such weights.
        """
        lines = []
        if self._weights_every and (saving or step % self._weights_every == 0):
            if step != self._compared:
                lines += self._compare_weights()
            self._compared = step
        if self._loss_every and step % self._loss_every == 0 and not saving:
            lines += self._compare_losses(step)
        return lines

    @torch.no_grad()
    def _compare_weights(self) -> list[str]:
        """Compare hashes in the groups of replicas; only if some differ, with names."""
        engine = self._engine
        parameters = sorted(engine.parameters.items(), key=lambda item: self._order(item[0]))
        zero = torch.zeros((), dtype=torch.int64, device=engine.device)
        hashes = [fingerprint(local_tensor(p)) if p.numel() else zero for _, p in parameters]
        records = [engine.model.records[name] for name, _ in parameters]
        differ = torch.zeros(len(hashes), dtype=torch.bool, device=engine.device)
        for group, which in self._replicas(records):
            own = torch.stack([hashes[i] for i in which])
            least = torch.cat([own, ~own])  # ~ turns the order round: the least of it is the most
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            low, high = least.chunk(2)
            differ[which] |= low != ~high
        if not float(all_reduce(differ.any().double(), self._groups.world)):
            return []
        held = {
            (record.stored, str(local_slices(parameter))): int(value)
            for (_, parameter), record, value, bad in zip(
                parameters, records, hashes, differ.tolist(), strict=True
            )
            if bad
        }
        return self._name_weights(self._gathered(held))

    def _order(self, name: str) -> tuple[str, str]:
        """Copies of a model and of an embedding go by one name."""
        return self._engine.model.records[name].stored, name

    def _replicas(
        self, records: Sequence[ParameterRecord]
    ) -> Iterator[tuple[dist.ProcessGroup, list[int]]]:
        """Groups whose ranks hold the same of some parameters, with the indices of these."""
        groups, experts = self._groups, self._groups.experts
        once = self._engine.layout.config.parallel.sharding.splits_optimizer
        data = groups.mesh["dp_replicate"].get_group() if once else groups.data
        edp = None
        if experts is not None:
            edp = experts.mesh["edp_replicate"].get_group() if once else experts.edp
        etp = None if experts is None else experts.etp
        tied = [i for i, record in enumerate(records) if "tied" in record.sums][:1]
        every = range(len(records))
        whole = [i for i in every if records[i].split_dim is None]
        for group, which in (
            (data, [i for i in every if not records[i].experts]),
            (groups.tp, [i for i in whole if not records[i].experts]),
            (edp, [i for i in every if records[i].experts]),
            (etp, [i for i in whole if records[i].experts]),
            (groups.mirror, [*every]),
            (groups.tied, tied),
        ):
            if group is not None and group.size() > 1 and which:
                yield group, which

    def _name_weights(self, held: Sequence[Mapping[tuple[str, str], int]]) -> list[str]:
        by_part: dict[tuple[str, str], dict[int, int]] = {}
        for rank, parts in enumerate(held):
            for part, value in parts.items():
                by_part.setdefault(part, {})[rank] = value
        wrong = {part: odd for part, ranks in by_part.items() if (odd := odd_ones(ranks))}
        if not wrong:
            return []
        first = min(wrong, key=self._position)
        name = first[0]
        more = len({stored for stored, _ in wrong}) - 1
        also = f", and {more} more parameters differ" if more else ""
        return [f"{name} of {self._names(wrong[first])} is not that of its replicas{also}"]

    def _position(self, part: tuple[str, str]) -> tuple[list[tuple[int, int | str]], str]:
        """By the order of layers: numbers within names count as such."""
        words = part[0].split(".")
        return [(0, int(w)) if w.isdecimal() else (1, w) for w in words], part[1]

    def _compare_losses(self, step: int) -> list[str]:
        """Let every replica compute the loss of the batch that one of them had in this step."""
        chosen = Random(f"{self._seed} {step}").randrange(self._grid.dp)
        own = self._engine.local_loss(self._loader.batch_of(chosen)).double().reshape(1)
        losses = all_gather(own, self._groups.world).tolist()
        lines = []
        for replicas in self._grid.groups(("dp_replicate", "dp_shard")):
            if odd := odd_ones({rank: losses[rank].hex() for rank in replicas}):
                values = " and ".join(f"{losses[rank]!r}" for rank in odd[:SHOWN])
                others = next((losses[r] for r in replicas if r not in odd), None)
                usual = "" if others is None else f", its replicas {others!r}"
                lines.append(
                    f"{self._names(odd)} computed a loss of {values} from the same "
                    f"microbatches{usual}"
                )
        return lines

    def _names(self, ranks: Sequence[int]) -> str:
        shown = " and ".join(f"rank {rank} {self._grid.name(rank)}" for rank in ranks[:SHOWN])
        more = len(ranks) - SHOWN
        return shown + (f" and {more} more ranks" if more > 0 else "")

    def _gathered(self, here: Mapping[tuple[str, str], int]) -> list[Mapping[tuple[str, str], int]]:
        found: list[Any] = [None] * self._grid.world_size
        dist.all_gather_object(found, here, group=self._groups.world)
        return found


def odd_ones(values: Mapping[int, Hashable]) -> list[int]:
    """The ranks whose value is not that of most ranks; all of them if there is no such value."""
    (most, count), *others = Counter(values.values()).most_common()
    if not others:
        return []
    return sorted(r for r, value in values.items() if value != most or 2 * count <= len(values))


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits; int64 scalar on its device.

    The sum modulo 2^64 of its elements' bits times odd numbers that differ from place to place, so
    that a change of any one element changes it.
    """
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    places = torch.arange(min(bits.numel(), _PIECE), device=tensor.device)
    factors = (2 * places + 1) * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(bits.split(_PIECE)):
        total = total * 31 + (piece * factors[: piece.numel()]).sum() + number
    return total
