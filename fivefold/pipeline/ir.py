"""The pipeline program: the actions of every rank in one training step, in order.

A `Program` is stored compute-only; `lowering.lower` adds the sends and receives. The same object is
run by the executor, timed by the simulator, checked by the validator and drawn.

The backward pass of a stage has two halves: B computes dX, the gradient of the stage's input; W
computes dW, the gradients of its weights. `BW` is both in one action, as one autograd call runs
them; its dX is sent when all of it has ended. `lowering.eager_dx` rewrites a program so that dX is
sent between the halves: each BW whose dX another rank waits for becomes B followed at once by W.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fivefold.errors import FivefoldError


class ProgramError(FivefoldError):
    """An invalid pipeline program: it would be wrong, run out of memory or deadlock."""


class Kind(StrEnum):
    """The kind of an action."""

    F = "F"  # forward of a stage
    B = "B"  # dX only
    W = "W"  # dW only, after B; may be split into parts
    BW = "BW"  # dX and dW in one action
    R = "R"  # recompute the forward, between F and B
    FB = "FB"  # one forward and one backward, overlapped: `kids` holds the two actions
    SEND = "SEND"  # start sending `message`
    RECV = "RECV"  # start receiving `message`; the first action that needs it waits
    UNSHARD = "UNSHARD"  # gather the stage's parameters
    RESHARD = "RESHARD"  # free the gathered parameters
    REDUCE = "REDUCE"  # start reducing the stage's gradients over the data-parallel ranks
    STEP = "STEP"  # clip and update, after all gradients are reduced; per rank, with stage -1


ELEMENTARY = (Kind.F, Kind.B, Kind.W, Kind.BW, Kind.R)
COMPUTE = frozenset({*ELEMENTARY, Kind.FB})
READS_PARAMETERS = frozenset({Kind.F, Kind.R, Kind.B, Kind.BW})  # W needs inputs and dY only
COMMUNICATION = frozenset({Kind.SEND, Kind.RECV})


class Direction(StrEnum):
    """Activations go forward, gradients of activations go backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


_DIRECTIONS = {Kind.F: Direction.FORWARD, Kind.B: Direction.BACKWARD, Kind.BW: Direction.BACKWARD}


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor sent from one rank to another; `id` is unique in the program, from 0."""

    id: int
    src_rank: int
    dst_rank: int
    src_stage: int
    dst_stage: int
    mb: int
    direction: Direction
    slice: int = 0

    def __str__(self) -> str:
        return (
            f"message {self.id} ({self.direction}, microbatch {self.mb}, stage {self.src_stage} "
            f"on rank {self.src_rank} -> stage {self.dst_stage} on rank {self.dst_rank})"
        )


Piece = tuple[int, int, int]
"""Stage, microbatch, slice."""


@dataclass(frozen=True, slots=True)
class Act:
    """One pipeline action of one rank.

    Attributes:
        kind: what the action does.
        stage: stage it belongs to; for SEND the sender's, for RECV the receiver's, for STEP -1.
        mb: microbatch; 0 where it has no meaning (UNSHARD, RESHARD, REDUCE, STEP).
        slice: sequence slice of the microbatch.
        part: index of the part, if W is split into parts.
        kids: the forward and the backward action of an FB.
        message: message of a SEND or RECV.
    """

    kind: Kind
    stage: int
    mb: int = 0
    slice: int = 0
    part: int = 0
    kids: tuple["Act", ...] = ()
    message: Message | None = None

    def __str__(self) -> str:
        if self.kids:
            return "&".join(str(kid) for kid in self.kids)
        if self.message:
            return f"{self.kind} {self.message}"
        if self.kind is Kind.STEP:
            return "STEP"
        if self.kind not in COMPUTE:
            return f"{self.kind} of stage {self.stage}"
        piece = f" slice {self.slice}" if self.slice else ""
        return f"{self.kind} of stage {self.stage} microbatch {self.mb}{piece}"

    @property
    def direction(self) -> Direction | None:
        """The way that its result goes to another stage; None if it stays."""
        return _DIRECTIONS.get(self.kind)

    @property
    def piece(self) -> Piece:
        """What of which microbatch it works on."""
        return self.stage, self.mb, self.slice

    @property
    def elementary(self) -> tuple["Act", ...]:
        """The action itself, or the two actions that an FB overlaps."""
        return self.kids or (self,)


def pair(forward: Act, backward: Act) -> Act:
    """An overlapped pair of a forward and a backward."""
    return Act(Kind.FB, forward.stage, forward.mb, kids=(forward, backward))


@dataclass(frozen=True)
class Program:
    """One training step of every rank.

    Attributes:
        placement: stage -> rank. Consecutive stages on different ranks exchange messages; on the
            same rank the tensor is passed on locally.
        num_microbatches: microbatches per step, on this pipeline.
        ranks: the actions of each rank, in order.
        messages: every message, once lowered; empty in the stored, compute-only form.
        forward_only: whether it is an evaluation, without backward actions.
        num_copies: copies of the model. With two (bidirectional schedules) the first half of the
            stages is one copy, the second half the other, and each takes half of the microbatches.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    ranks: tuple[tuple[Act, ...], ...]
    messages: tuple[Message, ...] = ()
    forward_only: bool = False
    num_copies: int = 1

    @property
    def num_ranks(self) -> int:
        """Pipeline-parallel size."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @cached_property
    def num_slices(self) -> int:
        """Number of sequence slices per microbatch."""
        return 1 + max((act.slice for act in self._elementary()), default=0)

    @cached_property
    def num_weight_parts(self) -> int:
        """Number of parts of each W."""
        return 1 + max((act.part for act in self._elementary()), default=0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in model order."""
        return stages_on(self.placement, rank)

    def path(self, mb: int) -> range:
        """The stages that a microbatch passes, in model order: those of its copy of the model."""
        length = self.num_stages // self.num_copies
        first = mb * self.num_copies // self.num_microbatches * length
        return range(first, first + length)

    def crossings(self) -> tuple[Message, ...]:
        """Every message that the placement requires, with ids 0, 1, 2, ... by microbatch."""
        hops: dict[range, list[tuple[Direction, int, int]]] = {}
        for path in {self.path(mb) for mb in range(self.num_microbatches)}:
            hops[path] = [
                (Direction.FORWARD, s, s + 1)
                for s in path[:-1]
                if self.placement[s] != self.placement[s + 1]
            ]
            if not self.forward_only:
                back = [(Direction.BACKWARD, dst, src) for _, src, dst in reversed(hops[path])]
                hops[path] += back
        each = (
            (mb, piece, hop)
            for mb in range(self.num_microbatches)
            for piece in range(self.num_slices)
            for hop in hops[self.path(mb)]
        )
        return tuple(
            Message(i, self.placement[src], self.placement[dst], src, dst, mb, direction, piece)
            for i, (mb, piece, (direction, src, dst)) in enumerate(each)
        )

    def _elementary(self) -> Iterator[Act]:
        return (kid for acts in self.ranks for act in acts for kid in act.elementary)


def stages_on(placement: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The stages that `placement` puts on `rank`, in model order."""
    return tuple(stage for stage, owner in enumerate(placement) if owner == rank)


def loop_placement(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Stage i on rank i % num_ranks: with 2 ranks 0 1 0 1."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def v_placement(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Down the ranks and back up, a V: with 2 ranks 0 1 1 0."""
    there = range(num_ranks)
    back = range(num_ranks - 1, -1, -1)
    return tuple(
        (back if stage // num_ranks % 2 else there)[stage % num_ranks]
        for stage in range(num_stages)
    )
