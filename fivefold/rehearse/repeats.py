"""Runs only the microbatches of a rehearsed step that differ from others; the others repeat them.

An action of the pipeline does the same for every microbatch of its stage, except for the first ones
and the last. So it runs as often as `RECORDED` says, and is counted from then on: its messages,
operations and memory. What enters and leaves a stage is passed on as in training, and sent by the
same code, so ranks are compared by everything that they send.
"""

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from fivefold.audit.routed import ChosenExperts, RecordedChoice
from fivefold.model.batch import Batch
from fivefold.pipeline.ir import COMPUTE, Act, Direction, Kind, Piece, Program
from fivefold.pipeline.run.executor import Executor, ProgramRun
from fivefold.rehearse.ledger import ActRecord, StepLedger

RECORDED = 3
"""How often an action runs before it is repeated. The first makes what stays until the end of the
step, such as gradients; the next two have to do the same."""

_Sort = tuple[Kind, int, int, int, bool]
"""What an action has in common with those of other microbatches: its kind, stage, slice and part,
and whether its microbatch's forward is the last that the stage has run."""


class UnlikeMicrobatchesError(Exception):
    """Microbatches of a stage differ, so that none may stand for others."""


@dataclass(frozen=True)
class _Form:
    """A tensor without its values.

    Attributes:
        size: bytes of its storage.
        passed: which of the tensors that entered the stage has the same storage; None: none.
    """

    size: int
    passed: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, entered: Sequence[UntypedStorage | None]) -> "_Form":
        """The form of a tensor, whose storage may be one that has entered."""
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        same = (
            i for i, one in enumerate(entered) if one is not None and one._cdata == storage._cdata
        )
        shape = tuple(tensor.shape)
        return cls(storage.nbytes(), next(same, None), shape, tensor.stride(), offset, tensor.dtype)

    def made(self, inputs: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A tensor like it, where these have entered."""
        whole = None if self.passed is None else inputs[self.passed]
        if whole is None:
            whole = torch.empty(self.size // self.dtype.itemsize, dtype=self.dtype, device=device)
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Effect:
    """What an action did.

    Attributes:
        record: its messages, operations and memory.
        held: which of the tensors that have entered its stage since the microbatch's forward it
            leaves held.
        given: the tensor that leaves its stage; None: none does.
        kept: tensors that it added to each list of the step.
        choices: what its routers chose.
    """

    record: ActRecord
    held: tuple[bool, ...]
    given: _Form | None
    kept: tuple[tuple[_Form, ...], ...]
    choices: tuple[RecordedChoice, ...] = field(compare=False)


class RepeatingRun(ProgramRun):
    """Runs a program, but repeats microbatches where it may.

    Args:
        ledger: records the step.
        chosen: records what routers choose.
        executor: of the rank.
        program: lowered.
        batches: as `Executor.run` takes them.
        scale: likewise.

    Raises:
        UnlikeMicrobatchesError: while it runs.
    """

    def __init__(
        self,
        ledger: StepLedger,
        chosen: ChosenExperts,
        executor: Executor,
        program: Program,
        batches: Sequence[Batch],
        scale: Tensor,
    ) -> None:
        super().__init__(executor, program, batches, scale)
        self._ledger, self._chosen = ledger, chosen
        last = {(act.stage, act.mb) for act in self._last_weights.values()}
        self._sorts = sorts_of(self._acts)
        self._last_acts = {act.piece: act for act in self._sorts}
        mixtures = (mixture for stage in executor.stages.values() for mixture in stage.mixtures)
        # Of a load that is summed over microbatches a stage keeps the latest sum until its next
        # forward. The forwards that do not run leave it to one that no other is compared with.
        sums = any("global_aux_loss" in dict(each.router.settings.aux_losses) for each in mixtures)
        self._repeated = repeated_microbatches(self._sorts, last, RECORDED + sums)
        self._effects: defaultdict[_Sort, list[_Effect]] = defaultdict(list)
        self._entered: defaultdict[Piece, list[weakref.ref[UntypedStorage]]] = defaultdict(list)
        self._inputs: defaultdict[Piece, list[Tensor | None]] = defaultdict(list)
        self._given: Tensor | None = None

    def _observed(self, act: Act) -> None:
        if not self._repeated:
            super()._observed(act)
        elif (act.stage, act.mb) in self._repeated:
            self._repeat(act)
        else:
            self._record(act)

    def _record(self, act: Act) -> None:
        """Run an action, and record what it does."""
        entered = self._entered[act.piece]
        if (address := self._input_of(act)) is not None:
            entered.append(weakref.ref(self._mail.arrived(address).untyped_storage()))
        lists = self._losses, self._z_sums, self._noted
        lengths, chosen = [len(each) for each in lists], len(self._chosen.seen())
        self._given = None

        def run() -> list[Tensor]:
            super(RepeatingRun, self)._observed(act)
            kept = [t for each, old in zip(lists, lengths, strict=True) for t in each[old:]]
            return kept if self._given is None else [*kept, self._given]

        record = self._ledger.record(run, entered)
        given, self._given = self._given, None
        there = [one() for one in entered]
        pairs = zip(lists, lengths, strict=True)
        effect = _Effect(
            record,
            tuple(one is not None for one in there),
            None if given is None else _Form.of(given, there),
            tuple(tuple(_Form.of(one, there) for one in each[old:]) for each, old in pairs),
            self._chosen.seen()[chosen:],
        )
        self._effects[self._sorts[act]].append(effect)

    def _repeat(self, act: Act) -> None:
        """Count an action, and pass on what enters and leaves its stage."""
        first, second = self._effects[self._sorts[act]][1:3]
        if first != second:
            raise UnlikeMicrobatchesError(f"{act} would repeat two that did not do the same")
        inputs = self._inputs[act.piece]
        if (address := self._input_of(act)) is not None:
            inputs.append(self._mail.take(address))
        self._ledger.repeat(second.record, act)
        self._chosen.repeat(second.choices)
        lists, device = (self._losses, self._z_sums, self._noted), self._on.device
        given = None if second.given is None else second.given.made(inputs, device)
        for each, forms in zip(lists, second.kept, strict=True):
            each += [form.made(inputs, device) for form in forms]
        inputs[:] = [one if held else None for one, held in zip(inputs, second.held, strict=True)]
        if act == self._last_acts[act.piece]:
            del self._inputs[act.piece]
        if given is not None:
            assert act.direction is not None
            to = act.stage + (1 if act.direction is Direction.FORWARD else -1)
            super()._give(act, act.direction, to, given)
        self._ledger.holdings.settle()

    def _give(self, act: Act, direction: Direction, stage: int, tensor: Tensor) -> None:
        self._given = tensor
        super()._give(act, direction, stage, tensor)


def sorts_of(acts: Sequence[Act]) -> dict[Act, _Sort]:
    """The sort of each action of a rank that computes, in order."""
    sorts: dict[Act, _Sort] = {}
    latest: dict[int, int] = {}
    for act in acts:
        if act.kind is Kind.F:
            latest[act.stage] = act.mb
        if act.kind in COMPUTE:
            newest = latest.get(act.stage) == act.mb
            sorts[act] = act.kind, act.stage, act.slice, act.part, newest
    return sorts


def repeated_microbatches(
    sorts: Mapping[Act, _Sort], last: set[tuple[int, int]], runs: int = RECORDED
) -> frozenset[tuple[int, int]]:
    """The microbatches of stages that need not run: each of their actions runs before for others.

    None where a forward and a backward are overlapped, since either changes what the other does.

    Args:
        sorts: sorts of a rank's actions, in order.
        last: stages with their last microbatch, which differs.
        runs: how often an action runs before.
    """
    if any(act.kids for act in sorts):
        return frozenset()
    acts: defaultdict[tuple[int, int], list[tuple[_Sort, int]]] = defaultdict(list)
    for time, (act, sort) in enumerate(sorts.items()):
        acts[act.stage, act.mb].append((sort, time))
    ran: defaultdict[_Sort, list[int]] = defaultdict(list)
    repeated = set()
    for which, its_acts in acts.items():
        enough = all(sum(t < time for t in ran[sort]) >= runs for sort, time in its_acts)
        if enough and which not in last:
            repeated.add(which)
        else:
            for sort, time in its_acts:
                ran[sort].append(time)
    return frozenset(repeated)
