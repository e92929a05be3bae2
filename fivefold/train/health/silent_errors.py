"""Finds errors that no device reports, by comparing what must be the same to the last bit.

Replicas hold the same weights, and compute the same loss from the same microbatches. A device or a
memory that computes or keeps something else shows nowhere but there.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.counts.parameters import ParameterRecord
from fivefold.data.loader import Loader
from fivefold.data.packing import Microbatch
from fivefold.data_parallel.watched import watching_gradients
from fivefold.mesh.collectives import all_gather, all_reduce, gather_objects
from fivefold.mesh.slices import Piece, local_slices, local_tensor
from fivefold.optim.adamw import STATES, state_name
from fivefold.optim.rounding import MASTER
from fivefold.train.engine import Engine
from fivefold.units import several

SHOWN = 8  # ranks
_PIECE = 1 << 20  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_FACTOR = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX generator
_WEIGHT = ""  # beside the names of moments and of their scales
_REPLICAS = ("dp_replicate", "dp_shard")

_Key = tuple[str, str, str]  # stored name, slices, weight or moment


@dataclass(frozen=True)
class _Hashed:
    """A weight or a moment of this rank.

    Attributes:
        kind: `_WEIGHT`, or the name of the moment, of its scales, or of a master on the host.
        record: record of the parameter.
        where: slices of the whole that this rank holds.
        hash: int64 scalar.
    """

    kind: str
    record: ParameterRecord
    where: str
    hash: Tensor


class SilentErrors:
    """Compares replicas at the intervals that the settings give; 0: never.

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
        self._seed, self._compared = training.seed, (0, False)
        self._deterministic = training.deterministic_mode

    def look(self, step: int, *, saving: bool) -> list[str]:
        """Lines that name ranks which differ from their replicas, the same on every rank; empty if
        none differs or no comparison is due; collective.

        Args:
            step: number of steps done.
            saving: whether a checkpoint is about to be written, which must not keep such weights.
        """
        lines = []
        due = self._weights_every and (saving or step % self._weights_every == 0)
        if due and self._compared not in ((step, saving), (step, True)):
            lines += self._compare_state(moments=saving)
            self._compared = step, saving
        if self._loss_every and step % self._loss_every == 0 and not saving:
            lines += self._compare_computation(step)
        return lines

    @torch.no_grad()
    def _compare_state(self, *, moments: bool) -> list[str]:
        """Compare hashes within groups of replicas; find names only if some differ.

        Args:
            moments: whether the optimizer's are compared, too: a checkpoint keeps those of one
                replica, and it takes long until a small error of them reaches a weight.
        """
        parts: list[_Hashed] = []
        differ: list[Tensor] = []
        for kind in (_WEIGHT, *STATES, MASTER) if moments else (_WEIGHT,):
            found = self._parts(kind)
            parts += found
            differ.append(self._differ(found))
        wrong = torch.cat(differ)
        if not float(all_reduce(wrong.any().double(), self._groups.world)):
            return []
        held = {
            (part.record.stored, part.where, part.kind): int(part.hash)
            for part, bad in zip(parts, wrong.tolist(), strict=True)
            if bad
        }
        return self._name_parts(gather_objects(held, self._groups.world))

    def _parts(self, kind: str) -> list[_Hashed]:
        """The weights of this rank, or one moment of each, in an order that is the same on ranks
        which hold the same; copies of a model and of an embedding go by one name."""
        engine, records, found = self._engine, self._engine.model.records, []
        moments: dict[str, Piece] = {}
        if kind == MASTER:  # masters in host memory; others are hashed with their weights
            moments = {state_name(kind, n): p for n, p in engine.optimizer.host.masters().items()}
        elif kind != _WEIGHT:
            moments = engine.optimizer.state_tensors()
        for name in sorted(engine.parameters, key=lambda name: (records[name].stored, name)):
            parameter = engine.parameters[name]
            if kind == _WEIGHT:
                value = fingerprint(local_tensor(parameter))
                beside = engine.optimizer.device.beside(name)
                value = value if beside is None else 31 * value + fingerprint(beside)
            elif (moment := moments.get(state_name(kind, name))) is not None:
                value = fingerprint(moment.local).to(engine.device)
            else:
                continue
            found.append(_Hashed(kind, records[name], str(local_slices(parameter)), value))
        return found

    def _differ(self, parts: Sequence[_Hashed]) -> Tensor:
        """Whether the hash of each part differs from that of a replica; bool [parts]."""
        differ = torch.zeros(len(parts), dtype=torch.bool, device=self._engine.device)
        for group, which in self._replicas([part.record for part in parts]):
            own = torch.stack([parts[i].hash for i in which])
            least = torch.cat([own, ~own])  # ~ reverses the order, so its least is the largest
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
            low, high = least.chunk(2)
            differ[which] |= low != ~high
        return differ

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

    def _name_parts(self, held: Sequence[Mapping[_Key, int]]) -> list[str]:
        by_part: dict[_Key, dict[int, int]] = {}
        for rank, parts in enumerate(held):
            for part, value in parts.items():
                by_part.setdefault(part, {})[rank] = value
        wrong = {part: odd for part, ranks in by_part.items() if (odd := odd_ones(ranks))}
        if not wrong:
            return []
        first = min(wrong, key=lambda part: (position(part[0]), part[1:]))
        name, kind = first[0], "" if first[2] == _WEIGHT else f"{first[2]} of "
        more = len({stored for stored, *_ in wrong}) - 1
        also = f", nor are those of {several(more, 'more parameter')}" if more else ""
        return [f"{kind}{name} of {self._names(wrong[first])} is not that of its replicas{also}"]

    def _compare_computation(self, step: int) -> list[str]:
        """Have every replica repeat a computation of this step of one replica, chosen at random:
        the loss, and on deterministic devices every gradient."""
        chosen = Random(f"{self._seed} {step}").randrange(self._grid.dp)
        batch = self._loader.batch_of(chosen)
        lines = self._compare_losses(batch)
        if self._engine.device.type == "cpu" or self._deterministic:
            lines += self._compare_gradients(batch)
        return lines

    def _compare_losses(self, batch: Sequence[Microbatch]) -> list[str]:
        own = self._engine.local_loss(batch).double().reshape(1)
        losses = all_gather(own, self._groups.world).tolist()
        lines = []
        for replicas in self._grid.groups(_REPLICAS):
            if odd := odd_ones({rank: losses[rank].hex() for rank in replicas}):
                values = " and ".join(f"{losses[rank]!r}" for rank in odd[:SHOWN])
                others = next((losses[r] for r in replicas if r not in odd), None)
                usual = "" if others is None else f", its replicas {others!r}"
                lines.append(
                    f"{self._names(odd)} computed a loss of {values} from the same "
                    f"microbatches{usual}"
                )
        return lines

    def _compare_gradients(self, batch: Sequence[Microbatch]) -> list[str]:
        """Compare each rank's own gradients before they are summed, then drop them."""
        engine = self._engine
        hashes: dict[str, Tensor] = {}
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in engine.parameters.items()
        }

        def look(parameter: Tensor, grad: Tensor) -> None:
            name = names[parameter]
            hashes[name] = hashes.get(name, 0) + fingerprint(grad)

        with engine.graphs.eagerly(), watching_gradients(engine.model.gradients.values(), look):
            engine.gradients(batch)
        engine.optimizer.zero_grad()
        zero = torch.zeros((), dtype=torch.int64, device=engine.device)
        own = fingerprint(torch.stack([zero, *hashes.values()])).reshape(1)
        totals = all_gather(own, self._groups.world).tolist()
        groups = [*self._grid.groups(_REPLICAS)]
        if not any(odd_ones({rank: totals[rank] for rank in replicas}) for replicas in groups):
            return []
        # From the last layer to the first, as an error in a backward spreads.
        arrived = [name for name in reversed(engine.parameters) if name in hashes]
        held = gather_objects({name: int(hashes[name]) for name in arrived}, self._groups.world)
        return [
            f"{self._names(odd)} computed another gradient of {name} from the same microbatches "
            f"than {'its' if len(odd) == 1 else 'their'} replicas{more}"
            for replicas in reversed(groups)
            for name, odd, more in _first_difference({rank: held[rank] for rank in replicas})
        ]

    def _names(self, ranks: Sequence[int]) -> str:
        shown = " and ".join(f"rank {rank} {self._grid.name(rank)}" for rank in ranks[:SHOWN])
        more = len(ranks) - SHOWN
        return shown + (f" and {several(more, 'more rank')}" if more > 0 else "")


def _first_difference(
    held: Mapping[int, Mapping[str, int]],
) -> Iterator[tuple[str, list[int], str]]:
    """The first parameter in backward order whose gradient differs between ranks, the ranks that
    differ, and the number of further such parameters; nothing if none does."""
    found = {}
    for name in next(iter(held.values())):
        if odd := odd_ones({rank: hashes.get(name) for rank, hashes in held.items()}):
            found[name] = odd
    if found:
        name, odd = next(iter(found.items()))
        more = len(found) - 1
        yield name, odd, f", and those of {several(more, 'more parameter')}" if more else ""


def position(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts parameter names in the order of layers: numbers in names compare as
    numbers."""
    words = name.split(".")
    return [(0, int(word)) if word.isdecimal() else (1, word) for word in words]


def odd_ones(values: Mapping[int, Hashable]) -> list[int]:
    """The ranks whose value differs from that of most ranks; all ranks if there is no majority."""
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
